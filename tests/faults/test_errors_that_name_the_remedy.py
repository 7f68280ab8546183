"""Errors name what the user has to look at: the other method, the variable."""

import jax.numpy as jnp
import pytest

import distjax as dj
from distjax.errors import ContextError
from tests.faults.four_parts import fix_of


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
