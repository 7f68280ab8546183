"""Dropout: whose mask, of what distribution, in which context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from replicas import per_replica

import distjax as dj
from distjax.errors import ContextError

KEY = jax.random.key(5)


def masks(strategy, out):
    return [np.asarray(x) != 0 for x in strategy.local_results(out)]


def ones(strategy, size=64):
    return per_replica(strategy, np.ones((strategy.num_replicas_in_sync, size), np.float32))


def test_each_replica_draws_a_mask_of_its_own(strategy, how):
    """Replica r has the mask of the key with r folded in, on every strategy."""
    step = how(lambda x: strategy.run(lambda x: dj.layers.dropout(KEY, 0.5, x), args=(x,)))
    found = masks(strategy, step(ones(strategy)))
    for replica, mask in enumerate(found):
        expected = jax.random.bernoulli(jax.random.fold_in(KEY, replica), 0.5, (64,))
        np.testing.assert_array_equal(mask, expected)
    assert len({mask.tobytes() for mask in found}) == len(found)


def test_synchronized_all_draw_the_same_mask(strategy, how):
    def replica_step(x):
        return dj.layers.dropout(KEY, 0.5, x, synchronized=True)

    step = how(lambda x: strategy.run(replica_step, args=(x,)))
    expected = jax.random.bernoulli(KEY, 0.5, (64,))
    for mask in masks(strategy, step(ones(strategy))):
        np.testing.assert_array_equal(mask, expected)


def test_synchronized_dropout_of_a_mirrored_value_is_mirrored(pair):
    x = jnp.ones(8)
    shared = pair.run(lambda x: dj.layers.dropout(KEY, 0.5, x, synchronized=True), args=(x,))
    own = pair.run(lambda x: dj.layers.dropout(KEY, 0.5, x), args=(x,))
    assert isinstance(shared, jax.Array)
    assert isinstance(own, dj.PerReplica)


@pytest.mark.parametrize("rate", [0.0, 0.25, 0.9])
def test_what_stays_is_scaled_so_that_the_expectation_is_kept(pair, rate):
    x = 2 * jnp.ones(20_000)
    out = pair.run(lambda x: dj.layers.dropout(KEY, rate, x), args=(x,))
    for values in pair.local_results(out):
        assert np.unique(values).size == (1 if rate == 0 else 2)
        np.testing.assert_allclose(np.max(values), 2 / (1 - rate), rtol=1e-6)
        np.testing.assert_allclose(np.mean(values), 2.0, atol=0.15)


def test_a_rate_may_be_traced_and_the_dtype_is_kept(pair):
    out = pair.run(
        lambda x, rate: dj.layers.dropout(KEY, rate, x), args=(jnp.ones(8, jnp.bfloat16), 0.5)
    )
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize("synchronized", [False, True])
def test_cross_replica_context_on_per_replica_values_goes_through_run(strategy, how, synchronized):
    drop = how(lambda x: dj.layers.dropout(KEY, 0.5, x, synchronized=synchronized))
    inside = strategy.run(
        lambda x: dj.layers.dropout(KEY, 0.5, x, synchronized=synchronized),
        args=(ones(strategy),),
    )
    with strategy.scope():
        outside = drop(ones(strategy))
    for a, b in zip(masks(strategy, inside), masks(strategy, outside), strict=True):
        np.testing.assert_array_equal(a, b)


def test_one_array_in_cross_replica_context_is_every_replicas(strategy, how):
    """Whether a value is proved equal or not, the masks are the same."""
    own = how(lambda x: dj.layers.dropout(KEY, 0.5, x))
    shared = how(lambda x: dj.layers.dropout(KEY, 0.5, x, synchronized=True))
    x = np.ones(64, np.float32)
    with strategy.scope():
        found, same = masks(strategy, own(x)), shared(x)
    for replica, mask in enumerate(found):
        expected = jax.random.bernoulli(jax.random.fold_in(KEY, replica), 0.5, (64,))
        np.testing.assert_array_equal(mask, expected)
    assert isinstance(same, jax.Array)
    np.testing.assert_array_equal(np.asarray(same) != 0, jax.random.bernoulli(KEY, 0.5, (64,)))


def test_with_no_strategy_in_sight_it_is_replica_zero():
    out = dj.layers.dropout(KEY, 0.5, np.ones(64, np.float32))
    expected = jax.random.bernoulli(jax.random.fold_in(KEY, 0), 0.5, (64,))
    np.testing.assert_array_equal(np.asarray(out) != 0, expected)


def test_derivative(pair):
    grad = pair.run(
        lambda x: jax.grad(lambda x: jnp.sum(dj.layers.dropout(KEY, 0.5, x)))(x),
        args=(jnp.ones(9),),
    )
    for values in pair.local_results(grad):
        assert set(np.asarray(values).tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize("rate", [-0.1, 1, 1.5])
def test_a_rate_outside_of_its_range(rate):
    with pytest.raises(ValueError, match="^dropout: rate needs to be at least 0 and less than 1"):
        dj.layers.dropout(KEY, rate, np.ones(3))


def test_a_per_replica_with_no_strategy_in_force(pair):
    x = ones(pair)
    with pytest.raises(ContextError, match="^dropout of a PerReplica needs cross-replica context"):
        dj.layers.dropout(KEY, 0.5, x)
