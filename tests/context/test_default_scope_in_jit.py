"""The scope of the default strategy changes nothing inside a traced step either."""

import jax.numpy as jnp

import distjax as dj


def test_a_write_in_the_default_scope_belongs_to_the_step():
    v = dj.Variable(1.0)

    @dj.jit
    def step(x):
        with dj.get_strategy().scope():
            v.assign_add(x)
        return v.value

    assert float(step(jnp.float32(2))) == 3.0
    assert float(v.value) == 3.0
