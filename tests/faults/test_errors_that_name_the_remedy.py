"""Errors name what the user has to look at: the other method, the variable."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError, DivergenceError
from tests.faults.four_parts import fix_of
from tests.replicas import ids, local


def test_gather_in_a_replica_names_all_gather(pair):
    with pytest.raises(ContextError) as caught:
        pair.run(lambda x: pair.gather(x, axis=0), args=(jnp.ones(3),))
    assert "all_gather(" in fix_of(caught.value)


@pytest.mark.parametrize("how", ["run", "jit"])
def test_a_second_creation_names_the_variable(pair, how):
    def fn(x):
        dj.Variable(jnp.zeros(3), name="offset", aggregation=dj.VariableAggregation.MEAN)
        return x

    by_run = lambda x: pair.run(fn, args=(x,))
    call = {"run": by_run, "jit": dj.jit(by_run)}[how]
    call(jnp.ones(3))
    with pytest.raises(ContextError) as caught:
        call(jnp.ones(3))
    assert "'offset'" in str(caught.value)


def test_a_split_variable_read_in_a_branch_that_differs_is_to_be_read_before():
    strategy = dj.ShardedStrategy(jax.devices()[:2], partition="parameters", min_split_bytes=0)
    with strategy.scope():
        v = dj.Variable(np.ones(4, np.float32), name="v")

    def read_in_branch(x):
        return jax.lax.cond(x > 0, lambda: v.value.sum(), lambda: x)

    def read_before(x):
        value = v.value
        return jax.lax.cond(x > 0, lambda: value.sum(), lambda: x)

    with pytest.raises(DivergenceError) as caught:
        strategy.run(read_in_branch, args=(ids(strategy),))
    assert "value = v.value before the cond" in fix_of(caught.value)
    assert local(strategy, strategy.run(read_before, args=(ids(strategy),))) == [0, 4]
