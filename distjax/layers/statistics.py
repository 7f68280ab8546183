"""Mean and variance over the batches of all replicas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from distjax.collectives.ops import sum_dtype
from distjax.context import frames
from distjax.masks import broadcast_mask
from distjax.typing import ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """Per-feature mean and (biased) variance [C] of a batch; unpacks to these two.

    Attributes:
      mean: the mean; 0 of no values.
      variance: the variance; 0 of no values.
      count: the number of values of each feature that they are over, [].
    """

    mean: Any
    variance: Any
    count: Any = 1

    def __iter__(self) -> Iterator[Any]:
        return iter((self.mean, self.variance))

    def __getitem__(self, index: int) -> Any:
        return (self.mean, self.variance)[index]


def batch_statistics(
    x: ArrayLike, mask: ArrayLike | None = None, *, synchronized: bool = True
) -> Statistics:
    """Returns the mean and variance of each feature over the global batch.

    ``mean = sum(x) / n`` and ``variance = sum((x - mean)^2) / n``, with sums and n
    over the examples of all replicas: the statistics of the whole batch on one device.
    The variance takes a second all-reduce: from ``mean(x^2) - mean(x)^2`` a large mean
    would cancel it.

    Args:
      x: [B, ..., C].
      mask: bool [B] (or any leading part of the shape of `x`): which examples
        count.
      synchronized: if False, over this replica's batch alone.

    Locality: T or M in; M out if synchronized. Context: replica or default; in
      cross-replica context, over the given array alone.
    Cost: two all-reduces of [C], and one of the count if there is a mask.

    Raises:
      BatchError: a mask of the wrong dtype or shape.
    """
    x = jnp.asarray(x)
    x = x.astype(sum_dtype(x.dtype))
    axes = tuple(range(x.ndim - 1))
    if mask is None:
        kept, count = None, jnp.asarray(x[..., 0].size, x.dtype)
    else:
        fix = "batch_norm(batch.data, training=True, mask=batch.mask)"
        kept = broadcast_mask(mask, x.shape[:-1], "batch_statistics: mask", fix)
        count = jnp.sum(kept, dtype=x.dtype)
    context = frames.current().replica_context

    def over_all(value: jax.Array) -> jax.Array:
        if not synchronized or context is None:
            return value
        return context.all_reduce("sum", value)

    def sum_kept(values: jax.Array) -> jax.Array:
        if kept is not None:
            values = jnp.where(kept[..., None], values, jnp.zeros_like(values))
        return over_all(jnp.sum(values, axis=axes))

    if kept is not None:
        count = over_all(count)
    elif synchronized and context is not None:
        count = count * context.num_replicas_in_sync
    divisor = jnp.maximum(count, 1)
    mean = sum_kept(x) / divisor
    centered = x - jnp.expand_dims(mean, axes)  # explicitly, for jax_numpy_rank_promotion
    return Statistics(mean, sum_kept(jnp.square(centered)) / divisor, count)
