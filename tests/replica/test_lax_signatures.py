"""dj.lax takes what jax.lax takes (decision 5)."""

import inspect

import jax
import jax.numpy as jnp
import pytest

import distjax as dj

ON_READ = {
    "synchronization": dj.VariableSynchronization.ON_READ,
    "aggregation": dj.VariableAggregation.SUM,
}


@pytest.mark.parametrize("name", ["scan", "fori_loop", "while_loop", "cond", "switch"])
def test_parameters_are_those_of_jax(name):
    public = lambda fn: [p for p in inspect.signature(fn).parameters if not p.startswith("_")]
    assert public(getattr(dj.lax, name)) == public(getattr(jax.lax, name))


@pytest.mark.parametrize("in_run", [True, False])
def test_operand_and_unroll(pair, in_run):
    with pair.scope():
        v = dj.Variable(0.0, **ON_READ)

    def step(x):
        add = lambda y: v.assign_add(y) if in_run else y
        dj.lax.cond(True, add, lambda y: y * 0, operand=x)
        dj.lax.switch(1, [lambda y: y, add], operand=x)
        return dj.lax.fori_loop(0, 4, lambda i, y: y + i, x, unroll=2)

    run = (lambda x: pair.run(step, args=(x,))) if in_run else step
    assert float(run(jnp.float32(2))) == 8.0
    assert float(v.value) == (8.0 if in_run else 0.0)


def test_operand_beside_operands():
    same = lambda *x: x
    with pytest.raises(TypeError, match="^cond needs its operands by position, or one as operand="):
        dj.lax.cond(True, same, same, 1, operand=2)
    with pytest.raises(TypeError, match="^switch needs its operands by position, or one as opera"):
        dj.lax.switch(0, [same], 1, operand=2)
