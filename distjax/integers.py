"""What counts as an integer where a user passes a count or an axis."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether `value` is a Python or NumPy integer, excluding bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
