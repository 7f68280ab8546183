"""What cannot be right is refused when a step is cut, in words, and nothing is applied."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback

import distjax as dj
from distjax.servers import ParameterServerStrategy
from tests.faults.four_parts import is_explained
from tests.servers.serial import SerialEngine, SerialStrategy


def assert_refused(kind, text, call, *args, **kwargs):
    with pytest.raises(kind, match=re.escape(text)) as caught:
        call(*args, **kwargs)
    assert is_explained(caught.value), str(caught.value)


@pytest.fixture
def ps():
    return SerialStrategy(2)


@pytest.fixture
def v(ps):
    with ps.scope():
        return dj.Variable(jnp.ones(3), name="v")


def _in_scan(v):
    def body(carry, x):
        v.assign_add(x)
        return carry, None

    dj.lax.scan(body, 0.0, jnp.ones((2, 3)))


def _in_fori_loop(v):
    dj.lax.fori_loop(0, 2, lambda i, c: (v.assign_sub(jnp.ones(3)), c)[1], 0.0)


def _in_while(v):
    def body(i):
        dj.get_replica_context().merge_call(lambda s, x: v.value + x, args=(i * jnp.ones(3),))
        return i + 1

    return jax.lax.while_loop(lambda i: i < 3, body, 0)


def _in_cond(v):
    dj.lax.cond(v.value.sum() > 0, lambda: v.assign_sub(jnp.ones(3)), lambda: v.value)


def _in_checkpoint(v):
    read = lambda x: dj.get_replica_context().merge_call(lambda s, x: v.value * x, args=(x,))
    return jax.grad(lambda x: jax.checkpoint(read)(x).sum())(jnp.ones(3))


@pytest.mark.parametrize(
    "step, construct",
    [
        (_in_scan, "a loop (scan or fori_loop)"),
        (_in_fori_loop, "a loop (scan or fori_loop)"),
        (_in_while, "a loop (while_loop or fori_loop)"),
        (_in_cond, "a branch (cond or switch)"),
        (_in_checkpoint, "checkpoint"),
    ],
)
def test_a_merge_in_a_loop_or_branch(ps, v, step, construct):
    text = f"a merge_call that meets a parameter server needs to be outside of {construct}"
    assert_refused(dj.errors.MergeError, text, ps.run, step, args=(v,))
    np.testing.assert_array_equal(v.value, [1.0, 1.0, 1.0])
    assert ps.engine.closures == 0


def test_an_update_that_reads_a_variable_of_another_server(ps, v):
    with ps.scope():
        other = dj.Variable(jnp.ones(3), name="other")
        with ps.extended.colocate_vars_with(v):
            beside = dj.Variable(jnp.ones(3), name="beside")

    def step(source):
        add = lambda s: v.assign_add(source.value)
        dj.get_replica_context().merge_call(add)

    text = "variable 'v', computed at server 0, from variables 'other' at server 1"
    assert_refused(dj.errors.MergeError, text, ps.run, step, args=(other,))
    ps.run(step, args=(beside,))  # the way out
    np.testing.assert_array_equal(v.value, [2.0, 2.0, 2.0])

    def mixed():
        return dj.get_replica_context().merge_call(lambda s: v.value + other.value)

    np.testing.assert_array_equal(ps.run(mixed), [3.0, 3.0, 3.0])  # joined by the worker

    def printed(s):
        jax.debug.print("{}", v.value + other.value)
        return v.value

    merge = lambda: dj.get_replica_context().merge_call(printed)
    assert_refused(
        dj.errors.MergeError, "a callback of its merge, computed at server 0", ps.run, merge
    )

    def used_twice(s):
        value = io_callback(np.sqrt, jax.ShapeDtypeStruct((), np.float32), np.float32(4))
        v.assign_add(value * jnp.ones(3))
        other.assign_add(value * jnp.ones(3))

    merge = lambda: dj.get_replica_context().merge_call(used_twice)
    assert_refused(dj.errors.MergeError, "one that servers 0 and 1 take part in", ps.run, merge)


def test_a_count_at_every_server_needs_what_every_server_has(ps, v):
    """The state of `apply_if_finite` depends on all gradients, which are sent to all servers."""
    with ps.scope():
        w = dj.Variable(jnp.ones(5), name="w")
        optimizer = dj.optim.Optimizer(optax.apply_if_finite(optax.sgd(0.1), 3))
        optimizer.init([v, w])

    def step(x):
        optimizer.apply_gradients([(v.value * x, v), (w.value * x, w)])

    ps.run(step, args=(jnp.float32(1.0),))
    ps.run(step, args=(jnp.float32(jnp.nan),))
    np.testing.assert_allclose(v.value, 0.9, rtol=1e-6)
    assert int(optimizer.state.notfinite_count.value) == 1


def test_variables_of_another_strategy(ps, v):
    lonely = dj.Variable(jnp.ones(3), name="lonely")
    with dj.OneDeviceStrategy().scope():
        elsewhere = dj.Variable(jnp.ones(3), name="elsewhere")
    kind = dj.errors.StrategyMismatchError
    read = lambda x: v.value + x.value
    assert_refused(kind, "needs variables of ParameterServerStrategy", ps.run, read, (lonely,))
    assert_refused(kind, "variable 'elsewhere'", ps.run, read, (elsewhere,))


def test_large_arrays_closed_over(ps, v):
    large = np.ones((3, 1 << 21), np.float32)
    add = lambda s: v.assign_add(jnp.sum(jnp.asarray(large), axis=1))
    steps = [
        lambda: jnp.sum(jnp.asarray(large)) + v.value,
        lambda: dj.get_replica_context().merge_call(add),
    ]
    for step in steps:
        text = "needs to close over at most 16 MiB of arrays"
        assert_refused(ValueError, text, ps.run, step)
    ps.run(lambda x: v.value + x[:, 0], args=(large,))


def test_components_per_worker(ps):
    modes = {
        "synchronization": dj.VariableSynchronization.ON_READ,
        "aggregation": dj.VariableAggregation.MEAN,
    }
    with ps.scope():
        text = "variable 'm' at a parameter server needs ON_WRITE, or ON_READ with SUM"
        assert_refused(ValueError, text, dj.Variable, 1.0, name="m", **modes)


@pytest.mark.parametrize("aggregation", dj.VariableAggregation)
def test_no_synchronization(ps, aggregation):
    modes = {"synchronization": dj.VariableSynchronization.NONE, "aggregation": aggregation}
    with ps.scope():
        text = "`NONE` variable synchronization mode is not supported for variable 'm'"
        assert_refused(ValueError, text, dj.Variable, 1.0, name="m", **modes)


def test_steps_that_are_not_one_replica_s(ps, v):
    kind = dj.errors.StrategyMismatchError
    rows = dj.VirtualStrategy(2).per_replica(jnp.ones((2, 3)))
    text = "needs one value per argument"
    assert_refused(kind, text, ps.cut_step, lambda x: x, (rows,))
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    text = "needs parameters that are variables at the servers"
    assert_refused(kind, text, ps.cut_step, lambda m: m(v.value), (model,))
    trace = lambda: jax.jit(lambda x: ps.cut_step(lambda x: x, (x,)))(1.0)
    assert_refused(dj.errors.ContextError, "needs to be scheduled outside of traces", trace)


def test_variables_are_made_before_the_step(ps):
    with pytest.raises(dj.errors.TraceLeakError, match="needs to be created outside of inner"):
        ps.run(lambda: dj.Variable(1.0, name="late").value)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"servers": 0}, "servers needs an int of 1 or more"),
        ({"workers": 0}, "workers needs an int of 1 or more"),
        ({"workers": [[1]]}, "workers needs a number, or devices for each"),
        ({"workers": True}, "workers needs an int of 1 or more"),
        ({"workers": []}, "workers needs a number, or devices for each"),
        ({"workers": [jax.devices()[:2], jax.devices()[2:3]]}, "workers needs as many devices"),
        ({"workers": [jax.devices()[:1] * 2]}, "devices needs at least one device. No duplicates"),
        ({"max_staleness": -1}, "max_staleness needs None or an int of 0 or more"),
        ({"cut": "bytes"}, "cut needs one of 'least_bytes', 'arguments'"),
    ],
)
def test_wrong_options(options, text):
    assert_refused(ValueError, text, ParameterServerStrategy, engine=SerialEngine(), **options)


def test_numbers_of_numpy_are_numbers():
    strategy = ParameterServerStrategy(workers=np.int64(2), servers=np.int64(3))
    assert (strategy.num_workers, len(strategy.servers)) == (2, 3)


def test_arrays_of_an_object_that_is_no_pytree(ps, v):
    class State:
        w = None

    state = State()
    state.w = jnp.ones(3)

    def writes(state):
        state.w = v.value + 1

    text = "argument state needs to be a pytree, since the function reads arrays of it."
    assert_refused(ValueError, text, ps.run, lambda state: v.assign_add(state.w), args=(state,))
    text = "writes needs to return what it computes, or to assign it to variables."
    assert_refused(dj.errors.TraceLeakError, text, ps.run, writes, args=(state,))
    np.testing.assert_array_equal(v.value, [1.0, 1.0, 1.0])


class Kept:
    def __init__(self, v):
        self.v, self.last = v, None

    def step(self, x):
        self.last = self.v.value + x
        self.v.assign_add(x)


def test_a_traced_value_left_in_the_object_of_a_method(ps, v):
    text = "Kept.step needs to return what it computes, or to assign it to variables."
    assert_refused(dj.errors.TraceLeakError, text, ps.run, Kept(v).step, args=(jnp.ones(3),))
    np.testing.assert_array_equal(v.value, [1.0, 1.0, 1.0])
