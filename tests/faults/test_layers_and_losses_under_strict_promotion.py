"""Half precision under strict promotion: what is computed wider is cast there, not promoted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj

MASK = np.array([True, True, False, True])
X = np.array([[1.0, 2.0], [3.0, 6.0], [7.0, 7.0], [5.0, 10.0]])
HALVES = ["float16", "bfloat16", "float32"]


def average(x, mask):
    share = dj.losses.average_loss(x, mask)
    return dj.get_replica_context().all_reduce("sum", share)


def statistics(x, mask):
    return dj.layers.batch_statistics(x, mask).mean


def dropped(x, mask):
    x = dj.layers.dropout(jax.random.key(0), jnp.float32(0.5), x, synchronized=True)
    return jnp.where(x == 0, 0, 1).sum()


def masked_mean(x, mask):
    return dj.get_replica_context().merge_call(
        lambda strategy, x, mask: strategy.reduce("mean", x, axis=0, mask=mask), args=(x, mask)
    )


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("step", [average, statistics, dropped, masked_mean])
def test_the_same_as_under_standard_promotion(pair, step, dtype):
    x = jnp.asarray(X, dtype)
    expected = pair.run(step, args=(x, MASK))
    with jax.numpy_dtype_promotion("strict"):
        found = pair.run(step, args=(x, MASK))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    assert found.dtype == expected.dtype


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_batch_normalization(pair, dtype, mask):
    with pair.scope():
        norm = dj.layers.BatchNormalization(2, momentum=0.5)
    x = jnp.asarray(X, dtype)
    with jax.numpy_dtype_promotion("strict"):
        y = pair.run(lambda: norm(x, training=True, mask=mask))
        inferred = pair.run(lambda: norm(x, training=False))
    assert y.dtype == x.dtype
    kept = X if mask is None else X[MASK]
    expected = (X - kept.mean(axis=0)) / kept.std(axis=0)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=0.02)
    np.testing.assert_allclose(norm.moving_mean.value, kept.mean(axis=0) / 2, rtol=1e-6)
    assert {v.dtype for v in pair.local_results(inferred)} == {x.dtype}


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int32"])
def test_labels_of_an_accuracy(pair, dtype):
    """A cast of the predictions to the dtype of the labels would take 256 for 0."""
    with pair.scope():
        accuracy = dj.metrics.Accuracy()
    logits = jnp.eye(300)[np.array([256, 1])]
    with jax.numpy_dtype_promotion("strict"):
        pair.run(lambda: accuracy.update(logits, jnp.array([0, 1], dtype)))
    assert float(accuracy.result()) == 0.5
