"""What an inner function reads of a variable is its value at that point of the step.

JAX caches the traces of inner `jit`, `scan`, `cond`, `remat` by function and shapes. A function
that is called before and after a write has to be traced again.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.xla_metadata import set_xla_metadata

import distjax as dj
from tests.conftest import STRATEGIES
from tests.replicas import local

NAMES = ["one_device", "mirrored2", "virtual2", "parameters2", "central3"]
MODES = {
    "on_write": {"aggregation": dj.VariableAggregation.MEAN},
    "on_read": {
        "synchronization": dj.VariableSynchronization.ON_READ,
        "aggregation": dj.VariableAggregation.MEAN,
    },
}


def make_readers(v):
    """Returns functions of a number that read `v` inside something that JAX caches."""
    read = lambda x: v.value + x
    jitted = jax.jit(read)
    return {
        "jit": jitted,
        "jit in jit": jax.jit(lambda x: jitted(x) + 0),
        "scan": lambda x, f=lambda c, _: (c + 0 * v.value, v.value + c): jax.lax.scan(
            f, x, None, length=1
        )[1][0],
        "fori_loop": lambda x, f=lambda i, c: c + v.value: jax.lax.fori_loop(0, 1, f, x),
        "while_loop": lambda x, c=lambda c: c[1] < 1, b=lambda c: (c[0] + v.value, c[1] + 1): (
            jax.lax.while_loop(c, b, (x, 0))[0]
        ),
        "cond": lambda x: jax.lax.cond(x > -99, read, read, x),
        "remat": jax.checkpoint(read),
        "grad of jit": lambda x: jitted(x) * jax.grad(jitted)(x),
        "vmap of jit": lambda x: jax.vmap(jitted)(x[None])[0],
        "plain": read,
    }


READERS = sorted(make_readers(None))


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, deadline=None)
@given(
    steps=st.lists(st.one_of(st.sampled_from(READERS), st.integers(1, 3)), min_size=3, max_size=6),
    how=st.sampled_from(["replica", "merge", "jit"]),
)
def test_law_an_inner_function_reads_the_value_of_now(name, mode, steps, how):
    """Readers and writes in any order, in a replica, a merge function and under `dj.jit`."""
    strategy = STRATEGIES[name]()
    with strategy.scope():
        v = dj.Variable(0.0, **MODES[mode])
    readers, expected, now = make_readers(v), [], 0.0
    for step in steps:
        now = now + step if isinstance(step, int) else now
        expected.append(now + 10)

    def walk(x):
        out = []
        for step in steps:
            if isinstance(step, int):
                v.assign(v.value + step)
                out.append(v.value + x)
            else:
                out.append(readers[step](x))
        return out

    x = jnp.float32(10)
    if how == "replica":
        out = strategy.run(walk, args=(x,))
    elif how == "merge":
        merge = lambda: dj.get_replica_context().merge_call(lambda _: walk(x))
        out = strategy.run(merge)
    else:
        with strategy.scope():
            out = dj.jit(walk)(x)
    for value, wanted in zip(out, expected, strict=True):
        found = [np.asarray(x) for x in strategy.local_results(value)]
        np.testing.assert_allclose(found, [wanted] * len(found))
    np.testing.assert_allclose(v.value, now)


def test_a_helper_in_a_loop_that_writes(pair):
    with pair.scope():
        v = dj.Variable(1.0, aggregation=dj.VariableAggregation.MEAN)
    helper = jax.jit(lambda x: x + v.value)

    def step(x):
        def body(carry, _):
            v.assign_add(1.0)
            return carry, helper(x)

        return helper(x), dj.lax.scan(body, 0.0, None, length=3)[1], helper(x)

    first, inside, last = pair.run(step, args=(0.0,))
    assert local(pair, first) == [1, 1] and local(pair, last) == [4, 4]
    assert local(pair, inside) == [[2, 3, 4]] * 2


def test_a_helper_that_asks_for_the_strategy():
    strategy = dj.VirtualStrategy(4)
    helper = jax.jit(lambda x: x * dj.get_strategy().num_replicas_in_sync)

    def step(x):
        before = helper(x)
        with strategy.scope():
            inside = helper(x)
        return before, inside, helper(x)

    assert [float(x) for x in dj.jit(step)(1.0)] == [1, 4, 1]


def test_metadata_of_the_user_around_a_write(pair):
    """What a block of the user's restores at its end is nothing that inner reads depend on."""
    with pair.scope():
        v = dj.Variable(1.0, aggregation=dj.VariableAggregation.MEAN)
    helper = jax.jit(lambda x: x + v.value)

    def step(x):
        before = helper(x)
        with set_xla_metadata(users_mark="1"):
            v.assign_add(1.0)
            inside = helper(x)
        return before, inside, helper(x)

    assert [float(x) for x in pair.run(step, args=(0.0,))] == [1, 2, 2]
    text = jax.jit(lambda x: x + 1).lower(1.0).as_text()
    assert "users_mark" not in text and "distjax" not in text


def test_what_tells_reads_apart_is_not_in_the_program(pair):
    with pair.scope():
        v = dj.Variable(1.0, aggregation=dj.VariableAggregation.MEAN)
    helper = jax.jit(lambda x: x + v.value)
    step = lambda x: (v.assign(helper(x)), helper(x))
    text = dj.jit(lambda x: pair.run(step, args=(x,))).lower(1.0).as_text()
    assert "distjax_trace" not in text and "frontend_attributes" not in text
