"""Dropout: whose mask, of what distribution, in which context."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError
from tests.replicas import per_replica

KEY = jax.random.key(5)


def masks(strategy, out):
    return [np.asarray(x) != 0 for x in strategy.local_results(out)]


def ones(strategy, size=64):
    return per_replica(strategy, np.ones((strategy.num_replicas_in_sync, size), np.float32))


def drop_both(x):
    """Returns x dropped by masks of the replicas' own, and by one mask for all."""
    own, shared = (dj.layers.dropout(KEY, 0.5, x, synchronized=is_one) for is_one in (False, True))
    return own, shared


def mask_of(replica):
    """Returns the mask of the key with the replica's number folded in."""
    return np.asarray(jax.random.bernoulli(jax.random.fold_in(KEY, replica), 0.5, (64,)))


SHARED = np.asarray(jax.random.bernoulli(KEY, 0.5, (64,)))


def assert_masks(strategy, own, shared):
    count = strategy.num_replicas_in_sync
    np.testing.assert_array_equal(masks(strategy, own), [mask_of(r) for r in range(count)])
    np.testing.assert_array_equal(masks(strategy, shared), [SHARED] * count)


def test_the_masks_of_a_key_are_all_different():
    assert len({mask.tobytes() for mask in (SHARED, *map(mask_of, range(8)))}) == 9


def test_in_replica_context(strategy):
    assert_masks(strategy, *strategy.run(drop_both, args=(ones(strategy),)))


def test_in_a_compiled_step(pair):
    step = dj.jit(lambda x: pair.run(drop_both, args=(x,)))
    assert_masks(pair, *step(ones(pair)))


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


def test_cross_replica_context_on_per_replica_values_goes_through_run(pair, how):
    drop = how(drop_both)
    with pair.scope():
        assert_masks(pair, *drop(ones(pair)))


def test_one_array_in_cross_replica_context_is_every_replicas(pair, how):
    """Whether a value is proved equal or not, the masks are the same."""
    drop = how(drop_both)
    with pair.scope():
        own, shared = drop(np.ones(64, np.float32))
    assert_masks(pair, own, shared)
    assert isinstance(shared, jax.Array)


def test_with_no_strategy_in_sight_it_is_replica_zero():
    out = dj.layers.dropout(KEY, 0.5, np.ones(64, np.float32))
    np.testing.assert_array_equal(np.asarray(out) != 0, mask_of(0))


def test_derivative(pair):
    grad = pair.run(
        lambda x: jax.grad(lambda x: jnp.sum(dj.layers.dropout(KEY, 0.5, x)))(x),
        args=(jnp.ones(9),),
    )
    for values in pair.local_results(grad):
        assert set(np.asarray(values).tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize(
    ("rate", "got"),
    [
        (-0.1, "-0.1"),
        (1, "1"),
        (1.5, "1.5"),
        (float("nan"), "nan"),
        (np.float32(1.5), "1.5"),
        (np.float32("nan"), "nan"),
        (jnp.bfloat16(2).item(), "2.0"),
        (np.array([0.5, -1, 2]), "-1.0"),
    ],
)
def test_a_rate_outside_of_its_range(rate, got):
    with pytest.raises(ValueError) as error:
        dj.layers.dropout(KEY, rate, np.ones(3))
    assert str(error.value).startswith(
        f"dropout: rate needs to be at least 0 and less than 1.\n  Got: {got}.\n  Why: the elements"
    )


@pytest.mark.parametrize("rate", [0, np.int32(0), np.float32(0), jnp.int32(0), np.zeros(3)])
def test_rates_of_any_kind(pair, rate):
    x = np.full(3, 2, np.float32)
    np.testing.assert_array_equal(dj.layers.dropout(KEY, rate, x), x)
    with pair.scope():
        out = dj.layers.dropout(KEY, rate, x)
    np.testing.assert_array_equal(pair.local_results(out), [x, x])


@pytest.mark.parametrize("x", [np.ones(4, np.int32), np.ones(4, bool), 3, [1, 2]])
@pytest.mark.parametrize("synchronized", [False, True])
def test_integers_are_refused(pair, x, synchronized):
    """Scaled and cut to integers, their expectation was another; TensorFlow refuses them too."""
    with pytest.raises(TypeError, match="^dropout: x needs floating-point values"):
        pair.run(lambda x: dj.layers.dropout(KEY, 0.3, x, synchronized=synchronized), args=(x,))


def test_a_per_replica_with_no_active_strategy(pair):
    x = ones(pair)
    with pytest.raises(ContextError, match="^dropout of a PerReplica needs cross-replica context"):
        dj.layers.dropout(KEY, 0.5, x)
