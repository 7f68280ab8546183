"""Sources: user iterators that can be returned to a position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distjax.errors import message


def keeps_position(source: object) -> bool:
    """Returns whether an iterator can save and restore its position, as grain's can.

    The iterator itself is asked, not its class: a wrapper may pass these methods on.
    """
    return callable(getattr(source, "get_state", None)) and callable(
        getattr(source, "set_state", None)
    )


def skip(source: Iterator[Any], count: int, needed: str) -> None:
    """Reads and drops elements that were delivered before.

    Args:
      source: at its first element.
      count: how many elements.
      needed: the start of the error text, e.g. "set_state needs a dataset".

    Raises:
      ValueError: the source has fewer elements.
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
