"""What counts as an integer where a user gives a number of something, or an axis."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether `value` is an int of Python or of numpy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
