"""Elements of per-worker data, by number: how one is made, and who has drawn which.

A dataset is read in the process of the worker that draws, or in the coordinator's: `Elements` gives
the element of a number there, if need be by making the dataset again. The coordinator counts: a
`Cursor` says which number comes next, and has what was given back.
"""

from __future__ import annotations

import copy
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from distjax.data.reader import drop, keeps_position
from distjax.errors import message
from distjax.placement.transfer import without_alias
from distjax.typing import DTypeLike, PyTree


class DataEnded(Exception):
    """There are no more elements for a worker."""


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


class NumberedElements(Protocol):
    """The elements of one dataset, by number, wherever it is read; `Elements` reads it here."""

    def __getitem__(self, index: int) -> Any:
        """Returns an element; raises DataEnded if there are not so many."""
        ...

    def state(self) -> Any:
        """Returns what `seek` may need to come back to the next element."""
        ...

    def seek(self, index: int, state: object = None) -> None:
        """Makes the element with this number the next one."""
        ...


class Elements(NumberedElements):
    """The elements of a dataset that is read in this process.

    Args:
      make: makes the dataset: at the first element, and to read an earlier one again.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make
        self._source: Any = None
        self._next = 0  # the number of the source's next element

    def open(self) -> None:
        """Makes the dataset now."""
        if self._source is None:
            self._source = iter(self._make())

    def __getitem__(self, index: int) -> Any:
        if index != self._next:
            self.seek(index)
        self.open()
        try:
            element = next(self._source)
        except StopIteration:
            raise DataEnded from None
        self._next += 1
        # The source may refill its memory while a program still reads this.
        return jax.tree.map(without_alias, element)

    def state(self) -> Any:
        """Returns the state of a source with ``get_state`` and ``set_state``, else None."""
        source = self._source
        return copy.deepcopy(source.get_state()) if keeps_position(source) else None

    def seek(self, index: int, state: object = None) -> None:
        """Makes the dataset again, and goes to an element of it.

        Raises:
          ValueError: the dataset is too short, or can be read only once.
        """
        source: Any = iter(self._make())
        if state is not None and keeps_position(source):
            source.set_state(copy.deepcopy(state))
        elif source is not self._source:
            drop(enumerate(source), index, "per-worker data needs a dataset")
        elif index != self._next:
            raise ValueError(_once_only(index))
        self._source, self._next = source, index


class Position(NamedTuple):
    """How far a dataset has been drawn.

    Attributes:
      num_read: how many elements were made.
      returned: those of them that nobody has drawn, or that were given back; the next one last.
      state: what the dataset needs to come back to the element after them.
    """

    num_read: int
    returned: tuple[Any, ...]
    state: Any


class Cursor:
    """Draws the elements of a dataset for one or several workers: each goes to one of them."""

    def __init__(self, elements: NumberedElements):
        self._elements = elements
        self._lock = threading.RLock()  # held while an element is made, whose maker may call us
        self._num_read = 0
        self._returned: list[Any] = []

    def draw(self) -> Any:
        """Returns the next element.

        Raises:
          DataEnded: there is no more.
        """
        with self._lock:
            if self._returned:
                return self._returned.pop()
            element = self._elements[self._num_read]
            self._num_read += 1
            return element

    def peek(self) -> Any:
        """Returns what `draw` would return; other threads' draws still find it."""
        with self._lock:
            self._returned.append(self.draw())
            return self._returned[-1]

    def give_back(self, element: PyTree) -> None:
        """Makes an element the next one again."""
        with self._lock:
            self._returned.append(element)

    def position(self) -> Position:
        """Returns the position in the dataset."""
        with self._lock:
            return Position(self._num_read, tuple(self._returned), self._elements.state())

    def restore(self, position: Position) -> None:
        """Goes back to `position`.

        Raises:
          ValueError: the dataset is too short, or can be read only once.
        """
        with self._lock:
            self._elements.seek(position.num_read, position.state)
            self._num_read, self._returned = position.num_read, list(position.returned)


def _once_only(count: int) -> str:
    return message(
        f"restore needs a per-worker dataset that can be read again, up to element {count}",
        got="one that is its own iterator",
        why="what it has given is gone",
        fix="pass a list, a class with __iter__, or a function that makes the iterator",
    )


# -- arrays that stay in the process of the worker that drew them -------------


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an array is: in which element of which dataset.

    Attributes:
      dataset: the number of the dataset.
      index: the number of the element.
      leaf: the number of the array among the leaves of the element.
      dtype: the dtype in which the array is wanted.
    """

    dataset: int
    index: int
    leaf: int
    dtype: np.dtype


@dataclasses.dataclass(frozen=True, eq=False)
class RemoteArray:
    """An array of an element that a worker has drawn, as the coordinator knows it.

    The step is cut for a stand-in of its shape and dtype. The worker that runs the closure has the
    element itself, or makes it again.

    Attributes:
      place: where it is.
      shape: its shape.
      fetch: returns the array itself.
    """

    place: Place
    shape: tuple[int, ...]
    fetch: Callable[[Place], np.ndarray]

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it is wanted."""
        return self.place.dtype

    def __repr__(self) -> str:
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.fetch(self.place), dtype)

    def astype(self, dtype: np.dtype) -> RemoteArray:
        """Returns the same array, wanted in another dtype."""
        return dataclasses.replace(self, place=dataclasses.replace(self.place, dtype=dtype))

    def stand_in(self) -> np.ndarray:
        """Returns zeros of its shape and canonical dtype, which take the memory of one number."""
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        return np.broadcast_to(np.zeros((), dtype), self.shape)


#: A flat argument of a closure.
Argument = jax.Array | np.ndarray | RemoteArray
