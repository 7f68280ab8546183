"""Elements of per-worker data, drawn in the process of a worker.

The coordinator knows an element by stream and number, and asks for its shapes. A process that does
not have the element makes it again: one that replaces a process that died, or that of another
worker that is given the closure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from distjax import jax_compat
from distjax.data.source import skip
from distjax.servers.on_ray.wire import OnWire, to_wire
from distjax.servers.remote_array import Place
from distjax.servers.streams import DataEnded
from distjax.typing import PyTree

#: How many elements of a stream are kept: for closures in progress, and for `next` by hand.
_KEPT = 8


class UnknownStream(Exception):
    """A process has not been told how a stream is made."""


class Elements:
    """The streams that a process knows."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._lock = threading.Lock()  # a worker draws while it computes

    def add(self, streams: dict[int, bytes]) -> None:
        """Adds streams by number, each as a pickled function that makes it."""
        from ray import cloudpickle

        with self._lock:
            for number, pickled in streams.items():
                if number not in self._streams:
                    self._streams[number] = _Stream(cloudpickle.loads(pickled))

    def drop(self, streams: Iterable[int]) -> None:
        """Drops streams that the coordinator no longer has."""
        with self._lock:
            for number in streams:
                self._streams.pop(number, None)

    def knows(self, arrays: Sequence[OnWire | Place]) -> bool:
        """Returns whether the stream of each array that lies in an element is known."""
        return all(not isinstance(x, Place) or x.stream in self._streams for x in arrays)

    def describe(self, stream: int, index: int) -> PyTree:
        """Returns an element, with a struct in place of each array.

        Raises:
          DataEnded: the stream ends before it.
          UnknownStream: the stream has not been added.
        """
        with self._lock:
            return jax.tree.map(_as_struct, self._find(stream).element(index))

    def array(self, place: Place) -> np.ndarray:
        """Returns one array, without waiting for another element that is being drawn."""
        stream = self._find(place.stream)
        try:
            element = stream.kept[place.index]
        except KeyError:
            with self._lock:
                element = stream.element(place.index)
        return np.asarray(jax.tree.leaves(element)[place.leaf], place.dtype)

    def _find(self, stream: int) -> _Stream:
        if stream not in self._streams:
            raise UnknownStream(stream)
        return self._streams[stream]


class _Stream:
    """The elements of one dataset, by number.

    Args:
      make: makes the dataset; called again for an element that is no longer kept.

    Attributes:
      kept: the latest elements read, by number.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make
        self._source: Any = None
        self._next = -1  # the number of the source's next element
        self.kept: dict[int, Any] = {}

    def element(self, index: int) -> Any:
        """Returns an element."""
        if index not in self.kept:
            self._read_to(index)
        return self.kept[index]

    def _read_to(self, index: int) -> None:
        if index != self._next:
            self._next = -1  # until the skip has succeeded
            self._source = iter(self._make())
            skip(self._source, index, "RayEngine needs a per-worker dataset")
            self._next = index
        try:
            element = next(self._source)
        except StopIteration:
            raise DataEnded from None
        self._next += 1
        # The source may reuse the memory of its elements.
        self.kept[index] = jax.tree.map(_own, element)
        for oldest in list(self.kept)[:-_KEPT]:
            del self.kept[oldest]


def _own(leaf: PyTree) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf if jax_compat.is_key_dtype(leaf.dtype) else np.asarray(leaf)
    return np.array(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def _as_struct(leaf: PyTree) -> Any:
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return to_wire([leaf])[0] if isinstance(leaf, jax.Array) else leaf
