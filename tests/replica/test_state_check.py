"""State that comes out different, in trees of the user's own classes and from wrapped functions."""

import functools

import jax
import jax.numpy as jnp
import pytest
from replicas import ids

import distjax as dj
from distjax.errors import LocalityWarning


@jax.tree_util.register_pytree_node_class
class LossScale:
    """A node that takes arrays only, as a loss scale that checks its dtype does."""

    def __init__(self, scale):
        if not jnp.issubdtype(jax.eval_shape(lambda: scale).dtype, jnp.floating):
            raise TypeError("a loss scale needs a floating dtype")
        self.scale = scale

    def tree_flatten(self):
        return (self.scale,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.fixture
def pair():
    return dj.VirtualStrategy(2)


def test_a_class_that_checks_its_arrays_is_an_argument_and_a_result(pair):
    def step(w, scale, x):
        total = dj.get_replica_context().all_reduce("sum", x)
        return w - total, LossScale(scale.scale / 2)

    w, scale = pair.run(step, args=(jnp.ones(()), LossScale(jnp.float32(8)), ids(pair)))
    assert (w, scale.scale) == (0, 4)


def test_state_of_such_a_class_that_comes_out_different_warns(pair):
    def forgetful(scale, x):
        return LossScale(scale.scale + x)

    with pytest.warns(LocalityWarning) as caught:
        out = pair.run(forgetful, args=(LossScale(jnp.float32(8)), ids(pair)))
    assert "forgetful takes state" in str(caught[0].message)
    assert isinstance(out.scale, dj.PerReplica)


def test_the_warning_names_the_function_of_a_partial(pair):
    def forgetful(params, x, scale):
        return {"w": params["w"] - scale * x}

    step = functools.partial(functools.partial(forgetful), scale=0.1)
    with pytest.warns(LocalityWarning, match="forgetful takes state.*\n.*params\\['w'\\]"):
        pair.run(step, args=({"w": jnp.ones(2)}, ids(pair)))
