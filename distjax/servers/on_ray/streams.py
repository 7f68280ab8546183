"""Per-worker data that is drawn in the processes of workers, as the coordinator sees it."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from distjax.errors import message
from distjax.servers.engine import WorkerDied
from distjax.servers.on_ray.failures import Failed
from distjax.servers.on_ray.orders import Unknown
from distjax.servers.on_ray.server import drain
from distjax.servers.on_ray.wire import Disguised, from_wire
from distjax.servers.on_ray.workers import RayWorkers
from distjax.servers.remote_array import Place, RemoteArray
from distjax.servers.streams import DataEnded
from distjax.typing import PyTree

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax.servers.on_ray.worker_actor import WorkerActor


class RayStreams:
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

    def send_sources(self, actor: ActorHandle[WorkerActor], arrays: Sequence[object]) -> list[Any]:
        """Sends a worker the functions that make the elements of `arrays`; returns its answers."""
        streams = {x.place.stream for x in arrays if isinstance(x, RemoteArray)}
        known = {number: self._pickled[number] for number in streams}
        return [actor.add_streams.remote(known)] if known else []

    def ask(self, worker: int, stream: int, method: str, *args: object) -> Any:
        """Calls a method of a worker that needs a stream; returns its result.

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
                    known = {stream: self._pickled[stream]}
                    answer: Any = ray.get(process.actor.add_streams.remote(known))
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
            actor.drop_streams.remote(dropped)


class RemoteElements:
    """The elements that a worker draws, in order; their arrays stay in its process.

    Its state can be set, so that a restore does not read the elements in between.
    """

    def __init__(self, streams: RayStreams, worker: int, number: int):
        self._streams, self._worker, self._number = streams, worker, number
        self._index = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        stream, index = self._number, self._index
        try:
            described = self._streams.ask(self._worker, stream, "draw", stream, index)
        except DataEnded:
            raise StopIteration from None
        self._index += 1
        leaf_numbers = itertools.count()

        def as_array(leaf: PyTree) -> Any:
            number = next(leaf_numbers)
            if isinstance(leaf, jax.ShapeDtypeStruct):
                place = Place(stream, index, number, np.dtype(leaf.dtype))
                return RemoteArray(place, leaf.shape, self._fetch)
            return from_wire([leaf])[0] if isinstance(leaf, Disguised) else leaf

        return jax.tree.map(as_array, described, is_leaf=lambda x: isinstance(x, Disguised))

    def _fetch(self, place: Place) -> np.ndarray:
        return self._streams.ask(self._worker, self._number, "fetch", place)

    def get_state(self) -> int:
        """Returns the number of the next element."""
        return self._index

    def set_state(self, state: int) -> None:
        """Makes the element with this number the next one."""
        self._index = state


def _unpicklable(error: Exception) -> str:
    return message(
        "create_per_worker_dataset needs a function that can be pickled, on RayEngine",
        got=f"one that cannot: {error}",
        why="it is called in the processes of the workers",
        fix="open files and connections inside of the function; or "
        'create_per_worker_dataset(fn, at="coordinator")',
    )
