"""The sizes of values, in the bytes that are sent."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from distjax import jax_compat


class HasDtype(Protocol):
    """What has a shape and a dtype."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def num_bytes(value: HasDtype) -> int:
    """Returns the bytes of a value; each PRNG key counts as 8."""
    itemsize = 8 if jax_compat.is_key_dtype(value.dtype) else np.dtype(value.dtype).itemsize
    return math.prod(value.shape) * itemsize
