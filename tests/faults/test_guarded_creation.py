"""A first call that fails leaves a variable that it creates without a value, and says so."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError

MEAN = dj.VariableAggregation.MEAN


class Model:
    """An object with one variable, made by the first step under a guard."""

    def __init__(self):
        self.v = None

    def step(self, x):
        if self.v is None:
            self.v = dj.Variable(jnp.zeros(3), name="v", aggregation=MEAN)
        self.v.assign_add(x)


@pytest.mark.parametrize("how", ["run", "jit"])
def test_a_call_after_one_with_a_wrong_shape(pair, how):
    model = Model()
    step = lambda x: pair.run(model.step, args=(x,))
    step = dj.jit(step) if how == "jit" else step
    with pytest.raises((TypeError, ValueError)):
        step(jnp.ones(4))
    read, write = lambda: model.v.value, lambda: model.v.assign_add(jnp.ones(3))
    for use in (lambda: step(jnp.ones(3)), read, write):
        with pytest.raises(ContextError, match="^variable 'v' needs an initial value(?s:.*)None"):
            use()
    model.v = None
    step(jnp.ones(3))
    step(jnp.ones(3))
    np.testing.assert_array_equal(model.v.value, np.full(3, 2))
