"""State that goes in equal and comes out different (decision 2)."""

import warnings

import jax.numpy as jnp
import pytest
from replicas import ids, local

import distjax as dj
from distjax.errors import LocalityError, LocalityWarning


def test_state_that_comes_out_different_warns(pair, how):
    params = {"w": jnp.ones(2), "b": jnp.zeros(())}

    def forgetful(params, x):
        return {"w": params["w"] - x, "b": params["b"]}, jnp.float32(0)

    with pytest.warns(LocalityWarning) as caught:
        how(lambda p, x: pair.run(forgetful, args=(p, x)))(params, ids(pair))
    text = str(caught[0].message)
    assert "forgetful takes state that is equal on every replica" in text.splitlines()[0]
    assert "params['w']" in text and "params['b']" not in text
    assert "all_reduce" in text


def test_state_that_stays_equal_does_not_warn(pair):
    def right(params, x):
        g = dj.get_replica_context().all_reduce("mean", x)
        return {"w": params["w"] - g, "b": params["b"]}, x

    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        pair.run(right, args=({"w": jnp.ones(2), "b": jnp.zeros(())}, ids(pair)))


def test_flax_train_state_that_comes_out_different_raises(pair):
    train_state = pytest.importorskip("flax.training.train_state")
    optax = pytest.importorskip("optax")

    class State(train_state.TrainState):
        batch_stats: dict

    start = State.create(
        apply_fn=None,
        params={"w": jnp.ones(2)},
        tx=optax.adam(0.1),
        batch_stats={"mean": jnp.zeros(2)},
    )

    def forgetful(state, x):
        return state.apply_gradients(grads={"w": state.params["w"] * x})

    with pytest.raises(LocalityError, match="^.*forgetful takes state that is equal") as info:
        pair.run(forgetful, args=(start, ids(pair)))
    assert "state.params['w']" in str(info.value)

    def diverging_statistics(state, x):
        return state.replace(batch_stats={"mean": state.batch_stats["mean"] + x})

    with pytest.warns(LocalityWarning, match="batch_stats"):
        out = pair.run(diverging_statistics, args=(start, ids(pair)))
    assert local(pair, out.batch_stats["mean"]) == [[0.0, 0.0], [1.0, 1.0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error", LocalityWarning)
        pair.run(diverging_statistics, args=(out, ids(pair)))  # T in, T out
