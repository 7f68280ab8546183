"""What a program knows of its operands beyond shape and dtype: memory, explicit axes, no jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import distjax as dj


@pytest.fixture
def on_host():
    """An array [8] in the memory of the host."""
    sharding = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return jax.device_put(jnp.arange(8.0), sharding)


@pytest.fixture
def explicit():
    """An array [4, 4] split over an explicit axis, and its mesh."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    spec = NamedSharding(mesh, PartitionSpec("d"))
    return jax.device_put(jnp.arange(16.0).reshape(4, 4), spec), mesh


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_an_argument_in_host_memory_stays_there(on_host, donated):
    """The wrong memory kind of a donated result aborts the process."""
    out, more = dj.jit(lambda a, b: (a, b + 1), donate_argnums=donated)(on_host, jnp.float32(1))
    assert out.sharding.memory_kind == "pinned_host" and float(more) == 2
    np.testing.assert_array_equal(out, np.arange(8.0))


def test_a_variable_in_host_memory_stays_there(on_host):
    v, w = dj.Variable(on_host), dj.Variable(0.0)

    @dj.jit
    def step(b):
        v.assign(v.value)
        w.assign_add(b)

    for _ in range(2):
        step(jnp.float32(1))
    assert v.value.sharding.memory_kind == "pinned_host" and float(w.value) == 2


def test_replicated_host_memory_in_a_replica_function(mirrored):
    sharding = NamedSharding(mirrored.mesh, PartitionSpec(), memory_kind="pinned_host")
    x = jax.device_put(jnp.arange(8.0), sharding)
    outs = mirrored.run(lambda a: (a, a * 2), args=(x,))
    assert [out.sharding.memory_kind for out in outs] == ["pinned_host"] * 2


def test_memories_are_not_mixed(on_host):
    add = lambda a, b: a + b
    for compiled in (jax.jit(add), dj.jit(add)):
        with pytest.raises(ValueError, match="memory_space"):
            compiled(on_host, jnp.ones(8))


@pytest.mark.parametrize("way", ["plain", "grad", "constant grad", "zeros", "vmap"])
def test_an_explicit_axis_is_kept(explicit, way):
    x, mesh = explicit
    double = lambda a: a * 2
    ways = {
        "plain": lambda jit: jit(double),
        "grad": lambda jit: jit(jax.grad(lambda a: (a * a).sum())),
        "constant grad": lambda jit: jit(jax.grad(lambda a: (a * 2).sum())),
        "zeros": lambda jit: jit(jnp.zeros_like),
        "vmap": lambda jit: jax.vmap(jit(double)),
    }
    with jax.set_mesh(mesh):
        ours, plain = ways[way](dj.jit)(x), ways[way](jax.jit)(x)
    assert ours.sharding.is_equivalent_to(plain.sharding, 2) and not ours.is_fully_replicated
    np.testing.assert_array_equal(ours, plain)


def test_an_argument_on_an_explicit_axis_is_donated(explicit):
    x, mesh = explicit
    with jax.set_mesh(mesh):
        dj.jit(lambda a: a * 2, donate_argnums=0)(x)
    assert x.is_deleted()


@pytest.mark.parametrize("way", ["run", "jit", "pmap"])
def test_without_jit(pair, way):
    fn = lambda a: a * 2 + 1
    ways = {
        "run": lambda: pair.run(fn, args=(jnp.float32(3),)),
        "jit": lambda: dj.jit(lambda x: pair.run(fn, args=(x,)))(jnp.float32(3)),
        "pmap": lambda: dj.pmap(fn, strategy=pair)(jnp.full(2, 3.0))[0],
    }
    with jax.disable_jit():
        assert float(ways[way]()) == 7


ELSEWHERE = {
    "mirrored": lambda devices: dj.MirroredStrategy(devices[2:4]),
    "virtual": lambda devices: dj.VirtualStrategy(2, devices[3]),
    "one_device": lambda devices: dj.OneDeviceStrategy(devices[3]),
    "central": lambda devices: dj.CentralStorageStrategy(devices[2:4]),
    "two_each": lambda devices: dj.MirroredStrategy(devices[2:6], model_axes={"model": 2}),
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_without_jit_constants_and_new_arrays_are_on_the_devices(kind):
    strategy = ELSEWHERE[kind](jax.devices())
    made = {}
    for disable in (False, True):
        with strategy.scope():
            v = dj.Variable(1.0, aggregation=dj.VariableAggregation.MEAN)
        with jax.disable_jit(disable):
            four, ones = strategy.run(lambda x: (jnp.float32(x.size), jnp.ones(3)), (jnp.ones(4),))
            strategy.run(lambda v=v: v.assign(jnp.float32(5)))
            total = strategy.reduce("sum", four)
        assert float(total) == 4 * strategy.num_replicas_in_sync
        assert float(v.value) == 5 and float(v.assign(6.0)) == 6
        made[disable] = [x.sharding for x in (four, ones, total, v.stored.read())]
    assert made[True] == made[False]


@pytest.mark.parametrize("is_argument", [False, True])
def test_without_jit_a_written_array_stays_the_users(pair, is_argument):
    """It is copied: the next step donates what the variable stores."""
    with pair.scope():
        v = dj.Variable(jnp.zeros(3))
    x = jax.device_put(jnp.ones(3), v.value.sharding)
    with jax.disable_jit():
        dj.jit(v.assign)(x) if is_argument else dj.jit(lambda: v.assign(x))()
    dj.jit(lambda: v.assign_add(jnp.ones(3)))()
    assert (x.tolist(), v.value.tolist()) == ([1, 1, 1], [2, 2, 2])


@pytest.mark.parametrize("is_guarded", [False, True])
def test_without_jit_a_function_that_creates_variables_ends(pair, is_guarded):
    with pair.scope():
        v = dj.Variable(jnp.ones(3))
    made = []

    @dj.jit
    def step():
        if not (is_guarded and made):
            made.append(dj.Variable(v.value * 2))
        made[-1].assign_add(v.value)
        return made[-1].value

    with jax.disable_jit(), pair.scope():
        assert step().tolist() == [3, 3, 3]
        if is_guarded:
            assert step().tolist() == [4, 4, 4]


@pytest.mark.parametrize("kinds", [("device", "pinned_host"), ("pinned_host", "device")])
def test_a_variable_that_moves_to_another_memory(mirrored, kinds):
    """What was traced for one memory is traced anew for the other."""
    replicated = NamedSharding(mirrored.mesh, PartitionSpec())
    first, second = (replicated.with_memory_kind(kind) for kind in kinds)
    v = dj.Variable(jax.device_put(jnp.arange(8.0), first))
    step = dj.jit(lambda: mirrored.run(lambda a: (a, a * 2), args=(v.value,)))
    for sharding in (first, second, first):
        v.assign(jax.device_put(jnp.arange(8.0), sharding))
        outs = step()
        assert [out.sharding.memory_kind for out in outs] == [sharding.memory_kind] * 2
        np.testing.assert_array_equal(outs[1], np.arange(8.0) * 2)


@pytest.mark.parametrize("jit", [jax.jit, dj.jit])
def test_a_result_lies_in_memory_as_the_step_says(jit):
    """JAX reads the layout of a result off the last operation, and not inside of calls."""
    columns = Layout((1, 0))
    out = jit(lambda a: with_layout_constraint(a * 2, columns))(jnp.ones((4, 6)))
    assert out.format.layout.major_to_minor == columns.major_to_minor


def test_a_weakly_typed_array_in_a_variable():
    """It is traced once, and a variable's type is its dtype: JAX's promotion takes it as such."""
    v, traces = dj.Variable(jnp.full((), 3.0)), []

    @dj.jit
    def step(x):
        traces.append(x.shape)
        v.assign(jnp.full((), 3.0))
        return v.value * 2, x * v.value

    for size in (2, 2, 3):
        double, product = step(jnp.ones(size, jnp.bfloat16))
    assert traces == [(2,), (3,)]
    assert double.dtype == product.dtype == jnp.float32 and not double.weak_type
