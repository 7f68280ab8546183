"""What run, reduce and dj.jit make of arguments that are easily taken for others."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import LocalityError
from tests.replicas import local


@pytest.mark.parametrize("mask", [None, np.array([True, True, False])])
@pytest.mark.parametrize("what", ["host", "list", "variable"])
def test_a_sum_of_one_value_is_refused_with_and_without_a_mask(pair, what, mask):
    with pair.scope():
        v = dj.Variable(np.array([1.0, 2.0, 3.0], np.float32), name="v")
    value = {"host": np.ones(3, np.float32), "list": np.float32(3), "variable": v}[what]
    mask = np.True_ if what == "list" and mask is not None else mask
    axis = None if what == "list" else 0
    error, text = (
        (LocalityError, "needs a value per replica")
        if what == "variable"
        else (
            ValueError,
            r"cannot be reduced with the given reduce op ReduceOp\.SUM",
        )
    )
    with pytest.raises(error, match=text):
        pair.reduce("sum", value, axis=axis, mask=mask)
    mean = pair.reduce("mean", value, axis=axis, mask=mask)
    wanted = {"host": 1.0, "list": 3.0, "variable": 2.0 if mask is None else 1.5}[what]
    assert float(mean) == wanted


def test_a_static_keyword_after_any_number_of_arguments():
    add = dj.jit(lambda *xs, flag: sum(xs) if flag else xs[0], static_argnames="flag")
    assert add(jnp.ones(2), jnp.ones(2), flag=True).tolist() == [2, 2]
    assert add(jnp.ones(2), jnp.ones(2), flag=False).tolist() == [1, 1]


def test_host_buffers_may_be_filled_again(pair):
    buffer = np.empty(64, np.float32)
    buffer[:] = 1
    rows = np.ones((2, 1024), np.float32)
    taken = pair.per_replica(rows)
    rows[:] = 2

    def fill(context):
        buffer[:] = context.replica_id_in_sync_group
        return buffer

    values = pair.distribute_values_from_function(fill)
    buffer[:] = 9
    assert [set(x) for x in local(pair, values)] == [{0.0}, {1.0}]
    assert [set(x) for x in local(pair, taken)] == [{1.0}, {1.0}]


def generator(x):
    yield x


async def coroutine(x):
    return x


TAKES_A_BUFFER = {
    "assign": lambda strategy, v, x: v.assign(x),
    "assign_add": lambda strategy, v, x: v.assign_add(x),
    "broadcast_to": lambda strategy, v, x: strategy.extended.broadcast_to(x),
}


@pytest.mark.parametrize("method", TAKES_A_BUFFER)
def test_law_a_buffer_is_copied_before_the_call_returns(strategy, method):
    """JAX may share the memory of a large buffer, or copy it after the call."""
    if method == "broadcast_to" and strategy is dj.get_strategy():
        pytest.skip("the default strategy has no devices to broadcast to")
    buffer = np.zeros((8, 50_000), np.float32)
    with strategy.scope():
        v = dj.Variable(buffer, aggregation=dj.VariableAggregation.MEAN)
        for _ in range(10):
            v.assign(np.zeros_like(buffer))
            buffer[:] = 1
            result = TAKES_A_BUFFER[method](strategy, v, buffer)
            buffer[:] = 2
            np.testing.assert_array_equal(v.value if method != "broadcast_to" else result, 1)


@pytest.mark.parametrize("fn", [generator, coroutine])
def test_a_function_whose_body_does_not_run_is_refused(pair, how, fn):
    with pytest.raises(TypeError, match=f"^{fn.__name__} needs to return values"):
        how(lambda: pair.run(fn, args=(1.0,)))()
