"""average_loss: the mean loss of a global batch, from each replica's part of it.

The mean of the replicas' means equals the mean of the batch only if every replica has the same
number of examples. With padding or weights it does not, and the gradient is wrong too. Here each
replica divides its own sum by the count over all replicas, so the sum over the replicas, of losses
and of gradients, is the mean over the whole batch for any R.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from distjax._src.collectives.ops import as_reduce_op, mean_dtype, sum_dtype
from distjax._src.context import frames
from distjax._src.masks import require_mask, spread_mask
from distjax._src.typing import ArrayLike, ReduceOp, ReduceOpLike
from distjax.errors import BatchError, describe_value

__all__ = ["average_loss"]


def __dir__() -> list[str]:
    return sorted(__all__)


def average_loss(
    losses: jax.Array, mask: jax.Array | None = None, op: ReduceOpLike = "sum"
) -> jax.Array:
    """Returns this replica's share of the mean loss over the global batch.

    ``all_reduce(op, average_loss(losses, mask, op)) = sum(mask * losses) / sum(mask)``
    with both sums over all replicas. So the loss, and with the same reduction the
    gradient, is the same for any number of replicas and any padding.

    Args:
      losses: a loss per example, [B, ...].
      mask: which examples count: bools or weights, [B] or any leading part of the shape
        of `losses`. None: all. If nothing counts, the loss is 0.
      op: how the gradients will be reduced: "sum", the default of `dj.optim.Optimizer`, or
        "mean", that of `dj.flax.apply_gradients`. The wrong one is off by a factor of R.

    Locality: T in, T out. Context: replica or default; in cross-replica context the
      arrays are the whole batch. Cost: with a mask, one all-reduce of a number.

    Raises:
      BatchError: a mask of the wrong shape, or losses without a batch dimension.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> losses, mask = np.array([1., 3., 5., 0.]), np.array([1, 1, 1, 0], bool)
      >>> (batch,) = strategy.distribute_dataset([(losses, mask)])
      >>> def step(batch):
      ...     share = dj.losses.average_loss(*batch)
      ...     return dj.get_replica_context().all_reduce("sum", share)
      >>> strategy.run(step, args=(batch,))  # (1 + 3 + 5) / 3
      Array(3., dtype=float32)

    Source: `tf.nn.compute_average_loss`, with a count instead of a batch size.
    """
    op = as_reduce_op(op)
    losses = jnp.asarray(losses)
    dtype = mean_dtype(losses.dtype)
    losses = losses.astype(sum_dtype(dtype))
    weights = _weights(losses, mask)
    total = jnp.sum(jnp.where(weights == 0, 0, losses) * weights)
    context = frames.current().replica_context
    count = jnp.sum(weights)
    if context is not None and mask is None:  # the shape is the same on all replicas
        count = count * context.num_replicas_in_sync
    elif context is not None:
        count = context.all_reduce("sum", count)
    share = total / jnp.where(count == 0, 1, count)
    if context is not None and op is ReduceOp.MEAN:
        share = share * context.num_replicas_in_sync
    return share.astype(dtype)


def _weights(losses: jax.Array, mask: ArrayLike | None) -> jax.Array:
    if losses.ndim == 0:
        raise BatchError(
            "average_loss needs a loss for each example, [B, ...]",
            got=describe_value(losses),
            why="an averaged loss no longer shows how many examples it is the mean of",
            fix="losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)",
        )
    if mask is None:
        return jnp.ones(losses.shape, losses.dtype)
    weights, fix = jnp.asarray(mask), "average_loss(losses, batch.mask), of a padded dataset"
    require_mask(weights, losses.shape, "average_loss: mask", fix, takes_weights=True)
    return spread_mask(weights.astype(losses.dtype), losses.shape)
