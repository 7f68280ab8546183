"""Per-worker data that is drawn in the processes of workers: here, and there.

The coordinator knows an element by dataset and number, and asks for its shapes. A process that does
not have the element makes it again: one that replaces a process that died, or that of another
worker that is given the closure.
"""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from distjax import jax_compat
from distjax.errors import message
from distjax.servers.elements import Elements, NumberedElements, Place, RemoteArray
from distjax.servers.engine import WorkerDied
from distjax.servers.on_ray.processes import RayWorkers, drain
from distjax.servers.on_ray.wire import Disguised, Failed, OnWire, Unknown, from_wire, to_wire
from distjax.typing import PyTree

if TYPE_CHECKING:
    from ray.actor import ActorHandle


#: How many elements of a dataset are kept: for closures in progress, and for `next` by hand.
_KEPT = 8
_NOT_KEPT = object()


# -- in the coordinator's process ---------------------------------------------


class RemoteData:
    """The functions that make per-worker data, by number; worker processes draw from them.

    Args:
      workers: the processes.
      max_failures: how many of them may be lost while one element is drawn.
    """

    def __init__(self, workers: RayWorkers, max_failures: int):
        self._workers, self._max_failures = workers, max_failures
        self._pickled: dict[int, bytes] = {}
        self._numbers = itertools.count()
        self._dropped: collections.deque[int] = collections.deque()  # only processes have them

    def open(self, worker: int, make: Callable[[], Iterable[Any]]) -> RemoteElements:
        """Returns the elements of ``make()``, which is called in the worker's process.

        Raises:
          TypeError: the function cannot be pickled.
        """
        from ray import cloudpickle

        try:
            pickled = cloudpickle.dumps(make)
        except Exception as error:
            raise TypeError(_unpicklable(error)) from error
        number = next(self._numbers)
        self._pickled[number] = pickled
        elements = RemoteElements(self, worker, number)
        weakref.finalize(elements, self._drop, number)
        return elements

    def send(self, actor: ActorHandle[Any], arrays: Sequence[object]) -> list[Any]:
        """Sends a worker the functions that make the elements of `arrays`; returns its answers."""
        numbers = {x.place.dataset for x in arrays if isinstance(x, RemoteArray)}
        known = {number: self._pickled[number] for number in numbers}
        return [actor.add_datasets.remote(known)] if known else []

    def ask(self, worker: int, dataset: int, method: str, *args: object) -> Any:
        """Calls a method of a worker that needs a dataset; returns its result.

        Raises:
          WorkerDied: too many processes were lost meanwhile.
          Exception: what the user's code raises, or `DataEnded`.
        """
        import ray
        from ray.exceptions import (
            RayError,
            RaySystemError,
            RayTaskError,
            UnserializableException,
        )

        failures = 0
        while True:
            process = self._workers.find(worker)
            self._send_dropped()
            try:
                answer: Any = ray.get(getattr(process.actor, method).remote(*args))
                if isinstance(answer, Unknown):
                    known = {dataset: self._pickled[dataset]}
                    answer: Any = ray.get(process.actor.add_datasets.remote(known))
                    if answer is None:
                        continue
            except RayTaskError as error:
                raise error.cause from None
            except (RaySystemError, UnserializableException):  # the element cannot be read here
                raise
            except RayError as error:
                death = self._workers.replace_dead(worker, process, None, error)
                failures += 1
                if failures == self._max_failures:
                    raise WorkerDied(death) from error  # it has begun: it is the data that kills
                continue
            if isinstance(answer, Failed):
                raise answer.error
            return answer

    def _drop(self, number: int) -> None:
        self._pickled.pop(number, None)
        self._dropped.append(number)

    def _send_dropped(self) -> None:
        dropped = drain(self._dropped)
        for actor in self._workers.actors() if dropped else ():
            actor.drop_datasets.remote(dropped)


class RemoteElements(NumberedElements):
    """The elements of a dataset that a worker's process reads; their arrays stay there."""

    def __init__(self, data: RemoteData, worker: int, number: int):
        self._data, self._worker, self._number = data, worker, number

    def __getitem__(self, index: int) -> Any:
        described = self._data.ask(self._worker, self._number, "draw", self._number, index)
        leaf_numbers = itertools.count()

        def as_array(leaf: PyTree) -> Any:
            number = next(leaf_numbers)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                place = Place(self._number, index, number, np.dtype(leaf.dtype))
                return RemoteArray(place, leaf.shape, self._fetch)
            return from_wire(leaf)

        return jax.tree.map(as_array, described, is_leaf=lambda x: isinstance(x, Disguised))

    def _fetch(self, place: Place) -> np.ndarray:
        return self._data.ask(self._worker, self._number, "fetch", place)

    def state(self) -> None:
        """Returns None: whoever draws an element by its number finds it."""

    def seek(self, index: int, state: object = None) -> None:
        """Does nothing: see `state`."""


def _unpicklable(error: Exception) -> str:
    return message(
        "create_per_worker_dataset needs a function that can be pickled, on RayEngine",
        got=f"one that cannot: {error}",
        why="it is called in the processes of the workers",
        fix="open files and connections inside of the function; or "
        'create_per_worker_dataset(fn, at="coordinator")',
    )


# -- in a worker's process ----------------------------------------------------


class UnknownDataset(Exception):
    """A process has not been told how a dataset is made."""


class DrawnElements:
    """The datasets that a process knows, and the latest elements that it has drawn."""

    def __init__(self) -> None:
        #: By number: the dataset, and those of its elements that are kept.
        self._datasets: dict[int, tuple[Elements, dict[int, Any]]] = {}
        self._lock = threading.Lock()  # a worker draws while it computes

    def add(self, datasets: dict[int, bytes]) -> None:
        """Adds datasets by number, each as a pickled function that makes it."""
        from ray import cloudpickle

        with self._lock:
            for number, pickled in datasets.items():
                if number not in self._datasets:
                    self._datasets[number] = Elements(cloudpickle.loads(pickled)), {}

    def drop(self, datasets: Iterable[int]) -> None:
        """Drops datasets that the coordinator no longer has."""
        with self._lock:
            for number in datasets:
                self._datasets.pop(number, None)

    def knows(self, arrays: Sequence[OnWire | Place]) -> bool:
        """Returns whether the dataset of each array that lies in an element is known."""
        return all(not isinstance(x, Place) or x.dataset in self._datasets for x in arrays)

    def describe(self, dataset: int, index: int) -> PyTree:
        """Returns an element, with a struct in place of each array.

        Raises:
          DataEnded: the dataset ends before it.
          UnknownDataset: the dataset has not been added.
        """
        return jax.tree.map(_as_struct, self._find(dataset, index))

    def array(self, place: Place) -> np.ndarray:
        """Returns one array, without waiting for another element that is being drawn."""
        element = self._find(place.dataset, place.index)
        return np.asarray(jax.tree.leaves(element)[place.leaf], place.dtype)

    def _find(self, dataset: int, index: int) -> Any:
        if dataset not in self._datasets:
            raise UnknownDataset(dataset)
        elements, kept = self._datasets[dataset]
        element = kept.get(index, _NOT_KEPT)
        if element is not _NOT_KEPT:
            return element
        with self._lock:
            if index not in kept:
                kept[index] = jax.tree.map(_on_host, elements[index])
                for oldest in list(kept)[:-_KEPT]:
                    del kept[oldest]
            return kept[index]


def _on_host(leaf: PyTree) -> Any:
    is_key = isinstance(leaf, jax.Array) and jax_compat.is_key_dtype(leaf.dtype)
    return np.asarray(leaf) if isinstance(leaf, (jax.Array, np.generic)) and not is_key else leaf


def _as_struct(leaf: PyTree) -> Any:
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return to_wire(leaf)
