"""The error for pickling objects that are tied to their process."""

from __future__ import annotations

from typing import NoReturn

from distjax.errors import message


def refuse_pickle(value: object, fix: str) -> NoReturn:
    """Refuses to pickle an object that is tied to workers and closures of this process.

    Args:
      value: the object.
      fix: what to do instead.

    Raises:
      TypeError: always.
    """
    raise TypeError(
        message(
            f"{value!r} needs to stay in its process",
            got=f"pickle of a {type(value).__name__}, or of what holds one",
            why="workers, closures and what they draw belong to this process",
            fix=fix,
        )
    )
