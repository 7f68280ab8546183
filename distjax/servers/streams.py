"""Streams of elements that workers draw, and give back if unused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import jax

from distjax.data.source import keeps_position, skip
from distjax.errors import message
from distjax.placement.host_values import without_alias
from distjax.typing import PyTree


class DataEnded(Exception):
    """A stream has no more elements for a worker."""


class PerWorkerSource(Hashable, Protocol):
    """Gives each worker its own values; may stand among the arguments of a closure."""

    def draw(self, worker: int) -> Any:
        """Returns a worker's next value, or raises DataEnded."""
        ...

    def peek(self, worker: int) -> Any:
        """Returns what `draw` would return, without drawing it."""
        ...

    def give_back(self, worker: int, value: PyTree) -> None:
        """Makes a drawn but unused value the next one again."""
        ...


class Position(NamedTuple):
    """How far a stream has been drawn.

    Attributes:
      num_read: elements that its source has made.
      returned: those of them that nobody has drawn, or that were given back; the next one last.
      state: the state of a source iterator with ``get_state`` and ``set_state``; else None.
    """

    num_read: int
    returned: tuple[Any, ...]
    state: Any


class Stream:
    """Elements of a dataset for one or several workers: each goes to one of them.

    Args:
      make: makes the dataset, at the first draw and again in a restore.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make
        self._lock = threading.RLock()  # held while the source makes an element, and may call us
        self._source: Any = None
        self._returned: list[Any] = []
        self._num_read = 0

    def open(self) -> None:
        """Makes the dataset now."""
        with self._lock:
            self._open()

    def draw(self) -> Any:
        """Returns the next element.

        Raises:
          DataEnded: there is no more.
        """
        with self._lock:
            self._open()
            return self._returned.pop() if self._returned else self._read()

    def peek(self) -> Any:
        """Returns what `draw` would return; other threads' draws still find it."""
        with self._lock:
            self._open()
            if not self._returned:
                self._returned.append(self._read())
            return self._returned[-1]

    def give_back(self, element: PyTree) -> None:
        """Makes an element the next one again."""
        with self._lock:
            self._returned.append(element)

    def position(self) -> Position:
        """Returns the position of the stream."""
        with self._lock:
            source = self._source
            state = copy.deepcopy(source.get_state()) if keeps_position(source) else None
            return Position(self._num_read, tuple(self._returned), state)

    def restore(self, position: Position) -> None:
        """Goes back to `position`.

        Raises:
          ValueError: the dataset is too short, or can be read only once.
        """
        with self._lock:
            source: Any = iter(self._make())
            if position.state is not None and keeps_position(source):
                source.set_state(copy.deepcopy(position.state))
            elif source is not self._source:
                skip(source, position.num_read, "restore needs a per-worker dataset")
            elif position.num_read != self._num_read:
                raise ValueError(_once_only(position.num_read))
            self._source, self._num_read = source, position.num_read
            self._returned = list(position.returned)

    def _open(self) -> None:
        if self._source is None:
            self._source = iter(self._make())

    def _read(self) -> Any:
        try:
            element = next(self._source)
        except StopIteration:
            raise DataEnded from None
        self._num_read += 1
        # The source may refill its memory while a program still reads this.
        return jax.tree.map(without_alias, element)


def _once_only(count: int) -> str:
    return message(
        f"restore needs a per-worker dataset that can be read again, up to element {count}",
        got="one that is its own iterator",
        why="what it has given is gone",
        fix="pass a list, a class with __iter__, or a function that makes the iterator",
    )
