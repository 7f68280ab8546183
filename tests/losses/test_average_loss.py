"""The mean loss of a global batch: one number for any replicas and any padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.errors import BatchError

X = np.arange(24.0, dtype=np.float32)
W = np.float32(3)


def losses_and_gradients(strategy, x, mask):
    """Returns, per op, the loss and its gradient: one program for both ops."""

    def step(w, x, mask):
        results = []
        for op in ("mean", "sum"):
            loss_fn = lambda w, op=op: dj.losses.average_loss((w - x) ** 2, mask, op)
            loss, gradient = jax.value_and_grad(loss_fn)(w)
            results.append(dj.get_replica_context().all_reduce(op, (loss, gradient)))
        return results

    (batch,) = strategy.distribute_dataset([(x, mask)])
    return np.asarray(jax.device_get(strategy.run(step, args=(W, *batch))))


@pytest.mark.parametrize("padding", [0, 24])
def test_loss_and_gradient_are_those_of_the_whole_batch(strategy, padding):
    x = np.concatenate([X, np.full(padding, 1e3, np.float32)])
    ours = losses_and_gradients(strategy, x, np.arange(len(x)) < len(X))
    np.testing.assert_allclose(ours, [[np.mean((W - X) ** 2), np.mean(2 * (W - X))]] * 2, 1e-6)


@pytest.mark.parametrize("is_masked", [False, True])
def test_beside_the_optimizer_with_the_defaults_of_both(strategy, is_masked):
    with strategy.scope():
        w = dj.Variable(W)
    optimizer = dj.optim.Optimizer(optax.sgd(0.5))
    optimizer.init([w])

    def step(x, mask):
        loss_fn = lambda w: dj.losses.average_loss((w - x) ** 2, mask if is_masked else None)
        optimizer.apply_gradients([(jax.grad(loss_fn)(w.value), w)])

    (batch,) = strategy.distribute_dataset([(X, np.ones(24, bool))])
    strategy.run(step, args=batch)
    assert float(w.value) == pytest.approx(W - 0.5 * np.mean(2 * (W - X)))


def test_without_a_mask_nothing_is_sent(mirrored):
    (batch,) = mirrored.distribute_dataset([X])
    step = lambda x: dj.losses.average_loss(x)
    assert "all-reduce" not in str(dj.explain(lambda x: mirrored.run(step, args=(x,)), batch))
    masked = lambda x: dj.losses.average_loss(x, x > 3)
    assert "all-reduce" in str(dj.explain(lambda x: mirrored.run(masked, args=(x,)), batch))


def test_weights_and_further_axes(pair):
    losses = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    weights = np.array([[0, 1], [2, 1], [0, 0], [1, 0]], np.float32)
    (batch,) = pair.distribute_dataset([(losses, weights)])
    step = lambda batch: dj.get_replica_context().all_reduce("sum", dj.losses.average_loss(*batch))
    assert float(pair.run(step, args=(batch,))) == pytest.approx(np.average(losses, None, weights))


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_masks_have_a_leading_part_of_the_shape_as_in_reduce_and_metrics(pair, ndim):
    losses = X.reshape(4, 3, 2)
    mask = np.arange(24).reshape(losses.shape)[(..., *[0] * (3 - ndim))] % 5 != 0
    (batch,) = pair.distribute_dataset([(losses, mask)])
    step = lambda batch: dj.get_replica_context().all_reduce("sum", dj.losses.average_loss(*batch))
    with pair.scope():
        metric = dj.metrics.Mean()
    metric.update(batch[0], mask=batch[1])
    total = pair.reduce("mean", batch[0], axis=(0, 1, 2), mask=batch[1])
    expected = pytest.approx(losses[mask].mean())
    assert [float(pair.run(step, args=(batch,))), float(metric.result()), float(total)] == [
        expected
    ] * 3


@pytest.mark.parametrize("dtype", [np.float16, np.int32])
def test_weights_are_counted_in_a_dtype_that_holds_them(pair, dtype):
    losses = np.arange(4).repeat(3000).astype(dtype)  # their number times two is no float16
    weights = np.array([0.5, 2, 1, 0.5], np.float32).repeat(3000)
    (batch,) = pair.distribute_dataset([(losses, weights)])
    step = lambda batch: dj.get_replica_context().all_reduce("sum", dj.losses.average_loss(*batch))
    expected = (2 * 1 + 1 * 2 + 0.5 * 3) / 4
    assert float(pair.run(step, args=(batch,))) == pytest.approx(expected, rel=1e-3)


def test_the_whole_batch_and_the_empty_one(pair):
    with pair.scope():
        assert float(dj.losses.average_loss(X, X > 5)) == X[6:].mean()
    assert float(dj.losses.average_loss(X)) == X.mean()
    empty = lambda: dj.losses.average_loss(X, jnp.zeros(24, bool))
    assert float(pair.reduce("sum", pair.run(empty))) == 0


def test_masks_and_losses_of_the_wrong_shape():
    text = r"^average_loss: mask needs bool values or weights of shape \(24,\) per replica\."
    with pytest.raises(BatchError, match=text):
        dj.losses.average_loss(X, np.ones(23, bool))
    text = r"shape \(4,\) per replica, or a longer leading part of \(4, 3, 2\)\."
    with pytest.raises(BatchError, match=text):
        dj.losses.average_loss(X.reshape(4, 3, 2), np.ones((4, 2), np.float32))
    with pytest.raises(BatchError, match="average_loss needs a loss for each example"):
        dj.losses.average_loss(jnp.float32(3))
