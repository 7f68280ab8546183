"""Masks, which say which examples of a batch count: checks and broadcasting."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from distjax.errors import BatchError, message
from distjax.jax_compat import ShapedArray
from distjax.typing import ArrayLike


def require_mask(
    mask: jax.Array | ShapedArray, shape: tuple[int, ...], where: str, fix: str
) -> None:
    """Raises a BatchError unless `mask` is bool and its shape is a prefix of `shape`.

    Args:
      mask: one replica's mask, or its shape and dtype.
      shape: the shape of the values.
      where: the mask's name in errors.
      fix: the corrected call.
    """
    if mask.dtype == jnp.bool_ and mask.shape == shape[: len(mask.shape)]:
        return
    raise BatchError(
        message(
            f"{where} needs bool values of shape {shape[:1]} per replica",
            got=f"{mask.dtype} of shape {mask.shape}",
            why="it says for each example whether it counts",
            fix=fix,
        )
    )


def broadcast_mask(mask: ArrayLike, shape: tuple[int, ...], where: str, fix: str) -> jax.Array:
    """Returns a bool mask, whose shape is a prefix of `shape`, broadcast to `shape`.

    Args, Raises: as for `require_mask`.
    """
    mask = jnp.asarray(mask)
    require_mask(mask, shape, where, fix)
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape)
