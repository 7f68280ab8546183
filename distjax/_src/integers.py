"""What counts as an integer where a user passes a count or an axis, and the error otherwise."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np

from distjax.errors import describe_value, message


def is_int(value: object) -> TypeGuard[int]:
    """Returns whether `value` is a Python or NumPy integer, excluding bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def require_int(
    what: str,
    value: object,
    at_least: int,
    *,
    why: str,
    fix: str,
    error: type[ValueError] = ValueError,
) -> int:
    """Returns `value` as a Python int.

    Args:
      what: the user's name for it, as in "take: num_steps".
      value: what the user gave.
      at_least: the smallest int that is allowed.
      why: the third part of the error's message.
      fix: the fourth part.
      error: the class of the error.

    Raises:
      ValueError: it is not an int, or less than `at_least`.
    """
    if is_int(value) and value >= at_least:
        return int(value)
    expected = f"{what} needs an int of {at_least} or more"
    raise error(message(expected, got=describe_value(value), why=why, fix=fix))
