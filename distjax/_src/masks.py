"""Masks, which say which examples of a batch count: checks and broadcasting.

One rule for all that take a mask: its shape is a leading part of the shape of the values, `[B]` for
a mask of examples, so that one element of it decides on all the values behind it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from distjax._src.jax_compat import ShapedArray
from distjax._src.typing import ArrayLike
from distjax.errors import BatchError


def require_mask(
    mask: jax.Array | ShapedArray,
    shape: tuple[int, ...],
    where: str,
    fix: str,
    *,
    takes_weights: bool = False,
) -> None:
    """Raises a BatchError unless `mask` is bool and its shape is a prefix of `shape`.

    Args:
      mask: one replica's mask, or its shape and dtype.
      shape: the shape of the values.
      where: the mask's name in errors.
      fix: the corrected call.
      takes_weights: whether it may hold numbers as well.
    """
    is_prefix = mask.shape == shape[: len(mask.shape)]
    if is_prefix and (takes_weights or mask.dtype == jnp.bool_):
        return
    kind = "bool values or weights" if takes_weights else "bool values"
    longer = f", or a longer leading part of {shape}" if len(shape) > 1 else ""
    raise BatchError(
        f"{where} needs {kind} of shape {shape[:1]} per replica{longer}",
        got=f"{mask.dtype} of shape {mask.shape}",
        why="it says for each example whether it counts",
        fix=fix,
    )


def broadcast_mask(mask: ArrayLike, shape: tuple[int, ...], where: str, fix: str) -> jax.Array:
    """Returns a bool mask, whose shape is a prefix of `shape`, broadcast to `shape`.

    Args, Raises: as for `require_mask`.
    """
    mask = jnp.asarray(mask)
    require_mask(mask, shape, where, fix)
    return spread_mask(mask, shape)


def spread_mask(mask: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns a mask that has been checked, broadcast to `shape`."""
    return jnp.broadcast_to(mask.reshape(mask.shape + (1,) * (len(shape) - mask.ndim)), shape)
