"""Sources: iterators of the user's that are taken back to a position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distjax.errors import message


def keeps_state(source: object) -> bool:
    """Returns whether an iterator can say where it is, and go there, as those of grain can."""
    return callable(getattr(source, "get_state", None)) and callable(
        getattr(source, "set_state", None)
    )


def skip(source: Iterator[Any], count: int, needed: str) -> None:
    """Reads elements that were delivered before, and drops them.

    Args:
      source: at its first element.
      count: how many.
      needed: who needs which dataset, for the error: "set_state needs a dataset".

    Raises:
      ValueError: it has fewer.
    """
    for i in range(count):
        try:
            next(source)
        except StopIteration:
            raise ValueError(
                message(
                    f"{needed} of at least {count} elements",
                    got=f"one that ended after {i}",
                    why="it is read again up to the element where the state was taken",
                    fix="pass a dataset that gives the same elements whenever it is iterated",
                )
            ) from None
