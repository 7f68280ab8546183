"""Which arrays live on: those of living variables, once each, and those that the user holds.

A program may own the arrays of the variables that it steps. It owns no results, it
ties no variable's arrays to those of another, and when it is collected, the values
are still there.
"""

import gc
import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import distjax as dj

#: Only what a test makes is collected.
pytestmark = pytest.mark.usefixtures("collect_garbage")

MEAN, SUM = dj.VariableAggregation.MEAN, dj.VariableAggregation.SUM
ON_READ = dj.VariableSynchronization.ON_READ

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
    "central": lambda: dj.CentralStorageStrategy(jax.devices()[:2]),
}

#: Sizes that no other array has: arrays are told by them.
_sizes = itertools.count(2 * 1009, 2)


@pytest.fixture(params=STRATEGIES)
def owner(request):
    return STRATEGIES[request.param]()


def make_variable(owner, **options):
    with owner.scope():
        size = next(_sizes)
        return dj.Variable(jnp.zeros(size), **{"aggregation": MEAN, **options})


def num_alive(size):
    """Returns how many buffers the living arrays have whose last axis has `size` elements.

    Several arrays may be handles of one buffer; a mirrored array has one on each device.
    """
    gc.collect()
    arrays = [x for x in jax.live_arrays() if x.shape[-1:] == (size,) and not x.is_deleted()]
    parts = [shard.data for x in arrays for shard in x.addressable_shards]
    return len({part.unsafe_buffer_pointer() for part in parts})


def make_step(owner, *variables):
    """Returns a step that adds one to each of the variables, compiled and called twice."""

    def add():
        for v in variables:
            v.assign_add(jnp.ones(v.shape))

    def step():
        owner.run(add)

    step(), step()
    return step


def is_all(variable, number):
    return variable.value.tolist() == [number] * variable.size


def test_a_program_keeps_no_result_alive(owner):
    v, size = make_variable(owner), next(_sizes)

    def step(x):
        v.assign_add(jnp.ones(v.shape))
        replica = dj.get_replica_context().replica_id_in_sync_group
        return {"equal": x + 1, "differs": x + replica, "value": v.value}

    x = jnp.zeros(size)
    alive = num_alive(size), num_alive(v.size)
    for _ in range(3):
        results = owner.run(step, args=(x,))
        assert num_alive(size) > alive[0]
        del results
        assert (num_alive(size), num_alive(v.size)) == alive


@pytest.mark.parametrize("state", ["kept", "donated"])
def test_a_jitted_function_keeps_no_result_alive(owner, state):
    size = next(_sizes)

    def step(x):
        return owner.run(lambda x: x + 1, args=(x,))

    jitted = dj.jit(step, donate_argnums=0 if state == "donated" else ())
    x = jitted(jnp.zeros(size))
    alive = num_alive(size)
    for _ in range(3):
        x = jitted(x)
    assert num_alive(size) == alive
    del x
    assert num_alive(size) == 0


@pytest.mark.parametrize("options", [{}, {"synchronization": ON_READ, "aggregation": SUM}], ids=str)
def test_a_variable_keeps_no_other_variables_arrays_alive(owner, options):
    a, b = make_variable(owner, **options), make_variable(owner, **options)
    size, alive = a.size, num_alive(a.size)
    step = make_step(owner, a, b)
    assert num_alive(size) == alive
    del a, step
    assert num_alive(size) == 0
    make_step(owner, b)
    assert num_alive(b.size) == alive


def test_a_variable_that_a_second_program_took_over_keeps_none_alive(owner):
    a, b, c = (make_variable(owner) for _ in range(3))
    size = a.size
    first, second = make_step(owner, a, b), make_step(owner, b, c)
    first(), second()
    del a, first
    assert num_alive(size) == 0
    second()
    assert is_all(b, 7) and is_all(c, 4)


def test_a_collected_program_leaves_the_values_with_the_variables(owner):
    a, b = make_variable(owner), make_variable(owner)
    alive = num_alive(a.size)
    step = make_step(owner, a, b)
    step()
    del step
    assert num_alive(a.size) == alive
    assert is_all(a, 3) and is_all(b, 3)
    make_step(owner, a)
    assert is_all(a, 5) and is_all(b, 3)


def test_a_held_value_outlives_the_next_step_and_no_more_than_that(owner):
    v = make_variable(owner)
    alive = num_alive(v.size)
    step = make_step(owner, v)
    held = v.value
    step()
    assert held.tolist() == [2] * v.size and is_all(v, 3)
    assert num_alive(v.size) == 2 * alive
    del held
    step()
    assert num_alive(v.size) == alive


def test_an_assigned_value_leaves_nothing_of_the_former_one(owner):
    v = make_variable(owner)
    alive = num_alive(v.size)
    step = make_step(owner, v)
    with owner.scope():
        v.assign(jnp.full(v.shape, 10.0))
    assert num_alive(v.size) == alive
    step()
    assert is_all(v, 11)
    assert num_alive(v.size) == alive


def test_a_refused_value_of_another_shape_leaves_nothing(owner):
    v, other_size = make_variable(owner), next(_sizes)
    alive = num_alive(v.size)
    step = make_step(owner, v)
    with owner.scope(), pytest.raises(ValueError, match="shape"):
        v.assign(jnp.zeros(other_size))
    step()
    assert is_all(v, 3)
    assert (num_alive(v.size), num_alive(other_size)) == (alive, 0)


def test_a_restored_value_leaves_nothing_of_the_former_one(owner, tmp_path):
    v, other = make_variable(owner), make_variable(owner)
    alive = num_alive(v.size)
    step = make_step(owner, v, other)
    with dj.checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, {"v": v})
        checkpointer.wait()
        step()
        checkpointer.restore({"v": v})
    assert num_alive(v.size) == num_alive(other.size) == alive  # orbax's threads have ended
    step()
    assert is_all(v, 3) and is_all(other, 4)
    assert num_alive(v.size) == num_alive(other.size) == alive


class Layer(nnx.Module):
    def __init__(self, size):
        self.weight, self.scale = nnx.Param(jnp.zeros(size)), nnx.Param(jnp.float32(1))


def test_a_module_whose_variable_changes_its_shape_leaves_the_former_one(owner):
    small, large = next(_sizes), next(_sizes)
    layer = Layer(small)

    def step():
        layer.weight[...] += layer.scale[...]

    owner.run(step), owner.run(step)
    alive = num_alive(small)
    layer.weight = nnx.Param(jnp.zeros(large))
    owner.run(step), owner.run(step)
    assert (num_alive(small), num_alive(large)) == (0, alive)
    assert layer.weight[...].tolist() == [2] * large
