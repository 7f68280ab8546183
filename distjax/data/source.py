"""Source: the user's iterable, opened at a position.

An iterator with `get_state` and `set_state`, such as grain's, restores its own state. Any other is
iterated again, and as many elements are dropped as had been used.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
import sys
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from distjax.data.elements import read_element
from distjax.errors import message
from distjax.typing import DatasetLike


def find_length(dataset: Sized) -> int | None:
    """Returns the length of `dataset`; None if it has none, does not tell, or is endless."""
    with contextlib.suppress(Exception):  # a stream may raise whatever it likes
        length = len(dataset)
        return length if length < sys.maxsize else None  # grain's endless datasets report maxsize
    return None


def keeps_position(source: object) -> bool:
    """Returns whether an iterator can save and restore its position, as grain's can.

    The iterator itself is asked, not its class: a wrapper may pass these methods on.
    """
    return callable(getattr(source, "get_state", None)) and callable(
        getattr(source, "set_state", None)
    )


def skip(source: Iterator[Any], count: int, needed: str) -> None:
    """Reads and drops the elements that were delivered before.

    Args:
      source: at its first element.
      count: how many elements.
      needed: the start of the error text, e.g. "set_state needs a dataset".

    Raises:
      ValueError: the source has fewer elements.
    """
    _Skip(source, count, needed).finish()


class Source:
    """A user's dataset, opened: its iterator, and how to open it at another position.

    Attributes:
      was_set: whether the iterator was set to a saved state of its own.

    Args:
      dataset: an iterable.
      iterator: one over it; None: a new one.
    """

    def __init__(self, dataset: DatasetLike, iterator: Iterator[Any] | None = None):
        self._dataset: Any = dataset
        self._iterator: Any = _open(dataset) if iterator is None else iterator
        self._is_one_shot = self._iterator is dataset  # its own iterator: gives its elements once
        self.was_set = False
        self._is_unread = True
        self._moved_from: Any = None  # the own state to return to, if another source has left it
        self._skip: _Skip | None = None

    @property
    def state(self) -> Any:
        """A copy of the iterator's own state; None if it keeps no position."""
        is_kept = keeps_position(self._iterator)
        return copy.deepcopy(self._iterator.get_state()) if is_kept else None

    def start(self) -> Iterator[Any]:
        """Returns the iterator at this position, to be read from."""
        self._is_unread = False
        if self._iterator is None:  # handed over
            self._iterator = _open(self._dataset)
        if self._moved_from is not None:
            self._iterator.set_state(self._moved_from)
            self._moved_from = None
        if self._skip is not None:
            self._skip.finish()
            self._skip = None
        return self._iterator

    def release(self) -> None:
        """Drops the iterator."""
        self._iterator, self._is_unread = None, False

    def at(self, state: Mapping[str, Any]) -> Source:
        """Returns a source after the element that had `state`: see `HostStream.state`.

        Either that source or this one can then be read on, but not both.

        Raises:
          ValueError: it is too short, its elements have another size, or it cannot be
            read again.
        """
        if self._is_one_shot:
            return self._one_shot_at(state)
        # An unread iterator is passed on: making another may advance a dataset's shuffle order.
        former, unread = self._iterator, self._iterator if self._is_unread else None
        if self._is_unread:
            self._iterator = None
        opened = Source(self._dataset, unread)
        if opened._iterator is former and unread is None:
            raise ValueError(_one_shot_text(self._dataset))
        if not opened._set_own_state(state):
            opened._skip_to(state)
            opened.start()
        opened._is_unread = False
        return opened

    def _one_shot_at(self, state: Mapping[str, Any]) -> Source:
        opened = Source(self._dataset, self._dataset)
        if "source" in state and keeps_position(self._dataset):
            if self._moved_from is None:
                self._moved_from = opened.state
            opened._set_own_state(state)
        elif self._is_unread:
            opened._skip_to(state)  # when it is read: until then, another state can be set
        else:
            raise ValueError(_one_shot_text(self._dataset))
        return opened

    def _set_own_state(self, state: Mapping[str, Any]) -> bool:
        """Sets the iterator to its own state in `state`; returns False if there is none."""
        if "source" not in state or not keeps_position(self._iterator):
            return False
        self._iterator.set_state(copy.deepcopy(state["source"]))
        self.was_set = True
        return True

    def _skip_to(self, state: Mapping[str, Any]) -> None:
        needed, size = "set_state needs a dataset", state.get("full_size")
        self._skip = _Skip(self._iterator, state["consumed"], needed, size)


def _open(dataset: DatasetLike) -> Iterator[Any]:
    if hasattr(dataset, "__iter__") or not isinstance(dataset, Sized):
        return iter(dataset)
    # Python reads such an object up to an IndexError, which a slice of an array never raises.
    return itertools.islice(iter(dataset), find_length(dataset))


class _Skip:
    """Drops elements of an iterator; after an interrupt, the next call drops the rest.

    Args:
      iterator: at its first element.
      count: how many elements.
      needed: the start of the error text.
      size: the leading dimension of the first element; None: unknown.
    """

    def __init__(self, iterator: Iterator[Any], count: int, needed: str, size: int | None = None):
        self._iterator, self._count = iterator, count
        self._needed, self._size = needed, size
        self._dropped: list[Any] = []  # the first element, and a bool for each of the others

    def finish(self) -> None:
        """Drops what is left to drop.

        Raises:
          ValueError: there are fewer elements, or they have another size.
        """
        while len(self._dropped) < self._count:
            before = len(self._dropped)
            # One call in C, so that whenever a signal arrives, what was read is in the list.
            following = map(next, (self._iterator,))
            self._dropped.extend(map(operator.is_, following, (None,)) if before else following)
            if len(self._dropped) == before:
                raise ValueError(self._short_text())
            if not before and self._size is not None:
                self._require_size(read_element(self._dropped[0], "element 0").leading_size)

    def _short_text(self) -> str:
        return message(
            f"{self._needed} of at least {self._count} elements",
            got=f"one that ended after {len(self._dropped)}",
            why="it is read again up to the element where the state was taken",
            fix="pass a dataset that gives the same elements whenever it is iterated",
        )

    def _require_size(self, size: int | None) -> None:
        if size != self._size:
            raise ValueError(size_text(f"{self._needed} with", size, self._size))


def size_text(needed: str, size: int | None, saved: int | None) -> str:
    """Returns the error text for batches of another size than in the saved state.

    Args:
      needed: how it begins, e.g. "batch 3 needs".
      size: the leading dimension found; None: the arrays have none in common.
      saved: the one in the state.
    """
    return message(
        f"{needed} {saved} examples in a full batch, as when the state was taken",
        got="arrays with no common leading dimension" if size is None else f"{size} examples",
        why="a position counts elements of the dataset: after as many of another size, some "
        "examples would come twice, or never",
        fix=f"give batches of {saved} examples; or begin the epoch again: leave the iterator out, "
        "checkpointer.restore(tree without it, partial=True)",
    )


def _one_shot_text(dataset: object) -> str:
    return message(
        "set_state needs a dataset that can be iterated again, or whose iterator has "
        "get_state and set_state",
        got=f"a {type(dataset).__name__} that is its own iterator and has been read from",
        why="what it has given is gone, so the same element cannot be reached again",
        fix="pass an iterable (a list, a dataset, a class with __iter__); or set the state before "
        "the first element is read",
    )
