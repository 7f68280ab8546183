"""The law of callbacks in merges: each runs once, at the one server; several are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import distjax as dj
from tests.faults.four_parts import is_explained

NUMBER = jax.ShapeDtypeStruct((), np.float32)


def debug_of_argument(look, x, v, u):
    jax.debug.callback(look, x)
    v.assign_add(x)
    u.assign_add(x)


def debug_of_variable(look, x, v, u):
    jax.debug.callback(look, v.value)
    v.assign_add(x)
    u.assign_add(x)


def value_of_one(look, x, v, u):
    v.assign_add(io_callback(look, NUMBER, x))
    u.assign_add(x)


def value_in_order(look, x, v, u):
    v.assign_add(io_callback(look, NUMBER, x, ordered=True))
    u.assign_add(x)


def value_returned(look, x, v, u):
    v.assign_add(x)
    u.assign_add(x)
    return io_callback(look, NUMBER, x + 1)


def in_a_loop(look, x, v, u):
    def body(i, total):
        jax.debug.callback(look, total)
        return total + x

    v.assign(jax.lax.fori_loop(0, 1, body, v.value))
    u.assign_add(x)


def in_jit(look, x, v, u):
    v.assign_add(jax.jit(lambda x: io_callback(look, NUMBER, x))(x))
    u.assign_add(jax.jit(lambda x: x * 1)(x))


BODIES = [
    debug_of_argument,
    debug_of_variable,
    value_of_one,
    value_in_order,
    value_returned,
    in_a_loop,
    in_jit,
]


def cut_with_callback(body, **options):
    """A strategy, a step whose merge calls back, its variables, and what the callback has seen."""
    strategy = dj.ParameterServerStrategy(workers=1, **options)
    with strategy.scope():
        v, u = (dj.Variable(jnp.zeros(()), name=name) for name in "vu")
    seen = []

    def look(x):
        seen.append(float(x))
        return np.float32(1)

    def step(x):
        merge = lambda strategy, x: body(look, x, v, u)
        return dj.get_replica_context().merge_call(merge, args=(x,))

    return strategy, step, (v, u), seen


@pytest.mark.parametrize("cut", ["least_bytes", "arguments"])
@pytest.mark.parametrize("body", BODIES)
def test_a_callback_in_a_merge_runs_once(body, cut):
    strategy, step, (v, u), seen = cut_with_callback(body, cut=cut)
    for count in (1, 2):
        strategy.run(step, args=(np.float32(1),))
        jax.effects_barrier()
        assert len(seen) == count
        assert (v.value, u.value) == (count, count)


def test_a_merge_of_two_servers_calls_nobody_back():
    strategy, step, (v, u), seen = cut_with_callback(debug_of_argument, servers=2)
    text = "merges with callbacks to run at one server"
    with pytest.raises(dj.errors.MergeError, match=text) as raised:
        strategy.run(step, args=(np.float32(1),))
    assert is_explained(raised.value)
    assert (v.value, u.value, seen) == (0, 0, [])


def test_a_print_that_raises_leaves_the_variables_their_values():
    strategy = dj.ParameterServerStrategy(workers=1)
    with strategy.scope():
        v = dj.Variable(jnp.ones(3), name="v")

    def merge(strategy, x):
        jax.debug.print("{:d}", x)  # no format of an array
        v.assign_add(x)

    step = lambda x: dj.get_replica_context().merge_call(merge, args=(x,))
    with pytest.raises(jax.errors.JaxRuntimeError, match="unsupported format string"):
        strategy.run(step, args=(np.ones(3, np.float32),))
    np.testing.assert_array_equal(v.value, np.ones(3))
