"""Host arrays from the user: copied, since the user may refill them, and without a mask."""

from __future__ import annotations

from typing import Any

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
