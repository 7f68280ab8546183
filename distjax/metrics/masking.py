"""Masked sums, and a division that gives 0 for 0 / 0."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from distjax.collectives.ops import sum_dtype
from distjax.errors import describe_value, message
from distjax.masks import broadcast_mask
from distjax.typing import ArrayLike, DTypeLike


def require_numbers(values: object, name: str) -> None:
    """Raises a TypeError if `values`, for the metric of this name, cannot be an array."""
    if not (values is None or isinstance(values, (str, bytes, Mapping))):
        return
    raise TypeError(
        message(
            f"update of metric {name!r} needs an array of numbers",
            got=describe_value(values),
            why="the metric is made of the sum of its values",
            fix="metric.update(loss); of a dict of losses: a metric for each, or metric.update(sum("
            "losses.values()))",
        )
    )


# Compiled, since eager constants would be transfers, which a transfer guard may disallow.
@functools.partial(jax.jit, static_argnums=2)
def masked_sum(
    values: ArrayLike, mask: ArrayLike | None, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum and the count of the values that the mask keeps.

    Args:
      values: [B, ...], or a number.
      mask: bool [B], or any leading part of the shape of `values`; None keeps
        all. Masked-out values may be NaN.
      dtype: the dtype of the total; the sum is computed in the wider of it and
        the dtype of `values`.

    Returns:
      (sum, count as int32), both [].

    Raises:
      BatchError: a mask of the wrong dtype or shape.
    """
    values = jnp.asarray(values)
    with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
        wide = jnp.promote_types(values.dtype, dtype)
    if mask is None:
        return jnp.sum(values.astype(wide)), jnp.asarray(values.size, jnp.int32)
    fix = "metric.update(batch_values, mask=batch.mask)"
    kept = broadcast_mask(mask, values.shape, "a metric's mask", fix)
    chosen = jnp.where(kept, values, jnp.zeros_like(values))
    return jnp.sum(chosen.astype(wide)), jnp.sum(kept.astype(jnp.int32))


@jax.jit
def divide_or_zero(total: ArrayLike, count: ArrayLike) -> jax.Array:
    """Returns ``total / count``; 0 if `count` is 0, NaN if it is negative (it wrapped around)."""
    total, count = jnp.asarray(total), jnp.asarray(count)
    if jnp.issubdtype(total.dtype, jnp.inexact):
        wide = sum_dtype(total.dtype)
        return _divide_or_zero(total.astype(wide), count.astype(wide)).astype(total.dtype)
    return _divide_or_zero(total, count)


def _divide_or_zero(total: jax.Array, count: jax.Array) -> jax.Array:
    quotient = total / jnp.where(count == 0, 1, count)
    quotient = jnp.where(count < 0, jnp.full_like(quotient, jnp.nan), quotient)
    return jnp.where(count == 0, jnp.zeros_like(quotient), quotient)
