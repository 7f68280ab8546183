"""An image classifier in NNX, trained by the loop that Flax's users write."""

import jax
import numpy as np
import optax
from flax import nnx

import distjax as dj

BATCH = 16


class Classifier(nnx.Module):
    """Linear, batch statistics, dropout, linear (a convolution only compiles longer)."""

    def __init__(self, *, rngs, axis_name=None, rate=0.0):
        self.hidden = nnx.Linear(36, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name=axis_name, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.out = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x, rngs=None):
        x = nnx.relu(self.norm(self.hidden(x.reshape(x.shape[0], -1))))
        return self.out(self.dropout(x, rngs=rngs))


def loss_fn(model, rngs, batch):
    logits = model(batch["image"], rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


def train_step(model, optimizer, metrics, rngs, batch):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, rngs, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    grads = dj.get_replica_context().all_reduce("mean", grads)
    optimizer.update(model, grads)


def eval_step(model, metrics, rngs, batch):
    loss, logits = loss_fn(model, rngs, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])


def train_step_on_view(model, optimizer, metrics, rngs, batch):
    """The newest form: the mode is that of a view made in the step."""

    def loss_on_view(model, rngs, batch):
        view = nnx.view(model, deterministic=False, use_running_average=False)
        return loss_fn(view, rngs, batch)

    grad_fn = nnx.value_and_grad(loss_on_view, has_aux=True)
    (loss, logits), grads = grad_fn(model, rngs, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    grads = dj.get_replica_context().all_reduce("mean", grads)
    optimizer.update(model, grads)


def eval_step_on_view(model, metrics, rngs, batch):
    eval_step(nnx.view(model, deterministic=True, use_running_average=True), metrics, rngs, batch)


def make_state(axis_name=None, rate=0.0, tx=None):
    """Returns (model, optimizer, metrics, rngs), as the loop makes them."""
    model = Classifier(rngs=nnx.Rngs(0), axis_name=axis_name, rate=rate)
    # A bias before batch normalization has gradients of rounding noise only; with the
    # usual eps Adam would blow that up to whole steps, also between two runs of plain NNX.
    tx = tx or optax.adamw(0.005, 0.9, eps=1e-3)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    return model, optimizer, metrics, nnx.Rngs(1)


def make_batches(count, size=BATCH):
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.normal(size=(size, 6, 6, 1)).astype(np.float32),
            "label": rng.integers(0, 10, size).astype(np.int32),
        }
        for _ in range(count)
    ]


def axis_of(strategy):
    """The axis over which batch statistics are synchronized; None where there is one replica."""
    return strategy.axis_name if strategy.num_replicas_in_sync > 1 else None


def values(tree):
    """Returns the arrays of NNX objects on the host."""
    leaves = jax.tree.leaves(nnx.state(tree))
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def is_key(x):
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
