"""An error in a user's function comes out alone, not chained to how distjax came to trace it."""

import sys

import jax.numpy as jnp
import pytest

import distjax as dj


class Mistake(Exception):
    pass


@pytest.fixture
def total(pair):
    with pair.scope():
        return dj.Variable(jnp.zeros(3), aggregation=dj.VariableAggregation.SUM)


@pytest.mark.parametrize("call", ["first", "new signature", "lower", "jit"])
@pytest.mark.parametrize("has_variable", [False, True])
def test_errors_are_not_chained(pair, total, call, has_variable):
    is_wrong = call in ("first", "lower")

    def step(x):
        if is_wrong:
            raise Mistake
        if has_variable:
            total.assign_add(x.sum() * jnp.ones(3))
        return x

    fn = dj.jit(lambda x: pair.run(step, args=(x,))) if call in ("jit", "lower") else step
    run = fn.lower if call == "lower" else fn if call == "jit" else lambda x: pair.run(fn, (x,))
    if not is_wrong:
        for _ in range(3):
            run(jnp.ones(3))
    is_wrong = True
    handled = sys.exc_info()[1]  # None, unless a test that interrupts at each line came before
    with pytest.raises(Mistake) as caught:
        run(jnp.ones(5))
    assert caught.value.__context__ is handled
