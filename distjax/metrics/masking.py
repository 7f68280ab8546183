"""Sums of values that a mask keeps."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distjax.errors import BatchError, explain


def masked_sum(values: Any, mask: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of the values that count, and how many these are.

    Args:
      values: [B, ...], or a number.
      mask: bool [B], or any leading part of the shape of `values`; None: all
        count. What it leaves out may be NaN.
      dtype: the dtype of the total that the sum is for; the sum is made in the
        wider of it and that of `values`.

    Returns:
      (sum, count as int32), both [].
    """
    values = jnp.asarray(values)
    wide = jnp.promote_types(values.dtype, dtype)
    if mask is None:
        return jnp.sum(values, dtype=wide), jnp.int32(values.size)
    kept = broadcast_mask(mask, values.shape)
    chosen = jnp.where(kept, values, jnp.zeros_like(values))
    return jnp.sum(chosen, dtype=wide), jnp.sum(kept, dtype=jnp.int32)


def broadcast_mask(mask: Any, shape: tuple[int, ...]) -> jax.Array:
    """Returns a bool mask of any leading part of `shape` as one of `shape`.

    Raises:
      BatchError: a mask of another dtype or shape.
    """
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_ or mask.shape != shape[: mask.ndim]:
        raise BatchError(
            explain(
                f"a metric's mask needs bool values of shape {shape[:1]} per replica",
                got=f"{mask.dtype} of shape {mask.shape}",
                why="it says for each example whether it counts",
                fix="metric.update(batch_values, mask=batch.mask)",
            )
        )
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape)


def divide_or_zero(total: Any, count: Any) -> jax.Array:
    """Returns ``total / count``, and 0 where `count` is 0."""
    total, count = jnp.asarray(total), jnp.asarray(count)
    quotient = total / jnp.where(count == 0, 1, count)
    return jnp.where(count == 0, jnp.zeros_like(quotient), quotient)
