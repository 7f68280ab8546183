"""Streams of elements: what a worker draws, given back where it cannot be used."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from distjax.data.source import keeps_state, skip
from distjax.errors import message
from distjax.typing import PyTree


class DataEnded(Exception):
    """A stream has no more elements for a worker."""


class Draw(Hashable, Protocol):
    """What stands for a worker's own value among the arguments of a closure."""

    def draw(self, worker: int) -> Any:
        """Returns a worker's next value, or raises DataEnded."""
        ...

    def peek(self, worker: int) -> Any:
        """Returns what `draw` would, and leaves it there."""
        ...

    def give_back(self, worker: int, value: PyTree) -> None:
        """Makes a value that was drawn and not used the next one again."""
        ...


class Position(NamedTuple):
    """How far a stream has been drawn.

    Attributes:
      num_drawn: elements drawn.
      state: of a source iterator that has ``get_state`` and ``set_state``; else None.
    """

    num_drawn: int
    state: Any


class Stream:
    """Elements of a dataset, to one or several workers: each to one of them.

    Args:
      make: makes the dataset, when the first element is drawn and again in a restore.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make
        self._lock = threading.Lock()  # held while the source makes an element
        self._source: Any = None
        self._returned: list[Any] = []
        self._num_drawn = 0
        self._state: Any = None  # of the source, before the last element that it made

    def open(self) -> None:
        """Makes the dataset now."""
        with self._lock:
            self._open()

    def draw(self) -> Any:
        """Returns the next element.

        Raises:
          DataEnded: there is none.
        """
        with self._lock:
            self._open()
            element = self._returned.pop() if self._returned else self._read()
            self._num_drawn += 1
            return element

    def peek(self) -> Any:
        """Returns what `draw` would; who draws meanwhile never finds it missing."""
        with self._lock:
            self._open()
            if not self._returned:
                self._returned.append(self._read())
            return self._returned[-1]

    def give_back(self, element: PyTree) -> None:
        """Makes an element the next one again."""
        with self._lock:
            self._returned.append(element)
            self._num_drawn -= 1

    def position(self) -> Position:
        """Returns after which element the stream is."""
        with self._lock:
            if self._source is not None and not self._returned:
                self._note_state()
            return Position(self._num_drawn, copy.deepcopy(self._state))

    def restore(self, position: Position) -> None:
        """Goes on after the element of `position`.

        Raises:
          ValueError: the dataset is too short, or can be read once only.
        """
        with self._lock:
            before, self._source, self._returned = self._source, None, []
            self._open()
            if position.state is not None and keeps_state(self._source):
                self._source.set_state(copy.deepcopy(position.state))
            elif self._source is before and position.num_drawn != self._num_drawn:
                raise ValueError(_once_only(position.num_drawn))
            elif self._source is not before:
                skip(self._source, position.num_drawn, "restore needs a per-worker dataset")
            self._num_drawn = position.num_drawn

    def _open(self) -> None:
        if self._source is None:
            self._source = iter(self._make())

    def _read(self) -> Any:
        self._note_state()
        try:
            element = next(self._source)
        except StopIteration:
            raise DataEnded from None
        # The source may fill the same memory again, while a program still reads this.
        return jax.tree.map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, element)

    def _note_state(self) -> None:
        if keeps_state(self._source):
            self._state = copy.deepcopy(self._source.get_state())


def _once_only(count: int) -> str:
    return message(
        f"restore needs a per-worker dataset that can be read again, up to element {count}",
        got="one that is its own iterator",
        why="what it has given is gone",
        fix="pass a list, a class with __iter__, or a function that makes the iterator",
    )
