"""Per-worker data: elements that workers draw for themselves, by number.

A dataset is read in the process of the worker that draws, or in the coordinator's: `Elements` gives
the element of a number there, if need be by making the dataset again. The coordinator counts: a
`Cursor` says which number comes next, and has what was given back. A `PerWorkerIterator` has a
cursor for each worker.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from distjax._src.data.options import InputContext
from distjax._src.data.reader import drop
from distjax._src.placement import without_alias
from distjax._src.typing import DTypeLike, PyTree
from distjax.errors import describe_value, require

# -- the elements of one dataset ----------------------------------------------


class DataEnded(Exception):
    """There are no more elements for a worker; its argument is the source, from `draw_each`."""


class PerWorkerSource(Hashable, Protocol):
    """Gives each worker its own values; may stand among the arguments of a closure."""

    def draw(self, worker: int) -> Any:
        """Returns a worker's next value, or raises DataEnded."""
        ...

    def give_back(self, worker: int, value: PyTree) -> None:
        """Makes a drawn but unused value the next one again."""
        ...


def draw_each(asked: Iterable[tuple[PerWorkerSource, int]]) -> list[Any]:
    """Returns the next values of sources for workers; if one raises, none is drawn."""
    drawn: list[tuple[PerWorkerSource, int, Any]] = []
    for source, worker in asked:
        try:
            drawn.append((source, worker, source.draw(worker)))
        except BaseException as error:
            for former, other, value in reversed(drawn):
                former.give_back(other, value)
            if isinstance(error, DataEnded):
                raise DataEnded(source) from None
            raise
    return [value for _, _, value in drawn]


class NumberedElements(Protocol):
    """The elements of one dataset, by number, wherever it is read; `Elements` reads it here."""

    def __getitem__(self, index: int) -> Any:
        """Returns an element; raises DataEnded if there are not so many."""
        ...


class Elements(NumberedElements):
    """The elements of a dataset that is read in this process.

    Args:
      make: makes the dataset: at the first element, and to read an earlier one again.
    """

    def __init__(self, make: Callable[[], Iterable[Any]]):
        self._make = make
        self._source: Iterator[Any] = iter(())
        self._next = -1  # the number of the source's next element; -1: it is not made yet

    def __getitem__(self, index: int) -> Any:
        if index != self._next:
            self._seek(index)
        try:
            element = next(self._source)
        except StopIteration:
            raise DataEnded from None
        self._next += 1
        # The source may refill its memory while a program still reads this.
        return jax.tree.map(without_alias, element)

    def _seek(self, index: int) -> None:
        """Makes the dataset, and goes to an element of it; raises a ValueError if it can't again.

        Some datasets are too short then, or can be read only once.
        """
        source = iter(self._make())
        require(
            source is not self._source,
            f"a restore needs per-worker data that can be read again, up to element {index}",
            got="one that is its own iterator",
            why="what it has given is gone",
            fix="pass a list, a class with __iter__, or a function that makes the iterator",
        )
        drop(enumerate(source), index, "per-worker data needs a dataset")
        self._source, self._next = source, index


class Position(NamedTuple):
    """How far a dataset has been drawn; `returned` were made and not used, the next one last."""

    num_read: int
    returned: tuple[Any, ...]


class Cursor:
    """Draws the elements of a dataset for one or several workers: each goes to one of them."""

    def __init__(self, elements: NumberedElements):
        self._elements = elements
        self._lock = threading.RLock()  # held while an element is made, whose maker may call us
        self._num_read = 0
        self._returned: list[Any] = []

    def draw(self) -> Any:
        """Returns the next element; raises DataEnded if there is no more."""
        with self._lock:
            if self._returned:
                return self._returned.pop()
            element = self._elements[self._num_read]
            self._num_read += 1
            return element

    def give_back(self, element: PyTree) -> None:
        """Makes an element the next one again."""
        with self._lock:
            self._returned.append(element)

    def position(self) -> Position:
        """Returns the position in the dataset."""
        with self._lock:
            return Position(self._num_read, tuple(self._returned))

    def restore(self, position: Position) -> None:
        """Goes back to `position`."""
        with self._lock:
            self._num_read, self._returned = position.num_read, list(position.returned)


# -- arrays that stay in the process of the worker that drew them -------------


@dataclasses.dataclass(frozen=True, eq=False)
class RemoteArray:
    """An array of an element that a worker has drawn, as the coordinator knows it.

    The step is cut for a stand-in of its shape and dtype. The worker that runs the closure has the
    array itself.

    Attributes:
      element: the engine's reference to the arrays of the element.
      number: the number of the array among them.
      shape: its shape.
      dtype: the dtype in which it is wanted.
      fetch: returns the arrays of an element here.
    """

    element: Hashable
    number: int
    shape: tuple[int, ...]
    dtype: np.dtype
    fetch: Callable[[Any], Sequence[np.ndarray]]

    def __repr__(self) -> str:
        return f"RemoteArray(shape={self.shape}, dtype={self.dtype})"

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.fetch(self.element)[self.number], dtype or self.dtype)

    def astype(self, dtype: np.dtype) -> RemoteArray:
        """Returns the same array, wanted in another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def stand_in(self) -> np.ndarray:
        """Returns zeros of its shape and canonical dtype, which take the memory of one number."""
        dtype = jax.dtypes.canonicalize_dtype(self.dtype)
        return np.broadcast_to(np.zeros((), dtype), self.shape)


#: A flat argument of a closure.
Argument = jax.Array | np.ndarray | RemoteArray


# -- for the user -------------------------------------------------------------


class PerWorkerValues:
    """One value per worker; in a step, the value of the worker that runs it.

    `schedule` gives the values to the workers there are then, in the order of their ids. One that
    is removed afterwards takes its value with it, and one that is added has none: it takes no
    closure that needs one.

    Args:
      values: by worker; as many as there are workers, else `schedule` raises a ValueError.

    Source: tf.distribute.experimental.coordinator.PerWorkerValues.
    """

    def __init__(self, values: Sequence[Any]):
        self.values = tuple(values)
        self._by_worker: Mapping[int, Any] | None = None  # until `schedule` gives them out

    def __repr__(self) -> str:
        return f"PerWorkerValues({list(self.values)!r})"

    def draw(self, worker: int) -> Any:
        """Returns the value of a worker."""
        if self._by_worker is None or worker not in self._by_worker:
            raise DataEnded
        return self._by_worker[worker]

    def give_back(self, worker: int, value: PyTree) -> None:
        """Does nothing: the value is still there."""

    @classmethod
    def of_workers(cls, by_worker: Mapping[int, Any]) -> PerWorkerValues:
        """Returns values of workers whose numbers need not start at 0."""
        values = cls(tuple(by_worker.values()))
        values._by_worker = dict(by_worker)
        return values

    def copy_for(self, workers: Sequence[int]) -> PerWorkerValues:
        """Returns the values for these workers, in containers and numpy arrays of their own.

        Elements that an iterator drew belong to their workers already.

        Raises:
          ValueError: as many values as there are workers are needed.
        """
        given = self._by_worker
        require(
            given is not None or len(self.values) == len(workers),
            f"PerWorkerValues needs a value for each of the {len(workers)} workers",
            got=f"{len(self.values)} values for workers {list(workers)}",
            why="a value without a worker would be dropped, and a worker without a value stay idle",
            fix=f"dj.PerWorkerValues([value_of(worker) for worker in {list(workers)}])",
        )
        if given is None:
            given = dict(zip(workers, self.values, strict=True))
        return self.of_workers({k: jax.tree.map(without_alias, v) for k, v in given.items()})


class PerWorkerIterator:
    """One iteration over a `PerWorkerDataset`.

    As an argument of `schedule` it stands for the next element of the worker that runs the
    closure. `next` on it returns one element of every worker, as `PerWorkerValues`.
    """

    def __init__(self, cursors: dict[int, Cursor]):
        self._cursors = cursors

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> PerWorkerValues:
        try:
            elements = draw_each((self, worker) for worker in self._cursors)
        except DataEnded:
            raise StopIteration from None
        return PerWorkerValues.of_workers(dict(zip(self._cursors, elements, strict=True)))

    def __repr__(self) -> str:
        return f"PerWorkerIterator(num_workers={len(self._cursors)})"

    def draw(self, worker: int) -> Any:
        """Returns a worker's next element, to be used by a closure."""
        if worker not in self._cursors:  # it was added after the iteration had begun
            raise DataEnded
        return self._cursors[worker].draw()

    def give_back(self, worker: int, value: PyTree) -> None:
        """Makes an element the worker's next one again."""
        self._cursors[worker].give_back(value)


class PerWorkerDataset:
    """A dataset from which each worker draws its own elements: see `Coordinator`.

    Source: tf.distribute.experimental.coordinator.PerWorkerDataset.

    Args:
      source: a function of an `InputContext`, called for each worker; or a dataset, whose elements
        go to whichever worker asks next.
      workers: returns the ids of the current workers.
      num_replicas: how many replicas each worker has.
      open_data: (worker, make) -> elements; called for each worker, if the source is a function.
      cursors: to which those of each new iterator are added.
    """

    def __init__(
        self,
        source: Callable[[InputContext], Iterable[Any]] | Iterable[Any],
        workers: Callable[[], list[int]],
        num_replicas: int,
        open_data: Callable[[int, Callable[[], Iterable[Any]]], NumberedElements],
        cursors: weakref.WeakSet[Cursor],
    ):
        self._source = source
        self._workers = workers
        self._num_replicas = num_replicas
        self._open_data = open_data
        self._cursors = cursors

    def __repr__(self) -> str:
        return f"PerWorkerDataset(num_workers={len(self._workers())})"

    def __iter__(self) -> PerWorkerIterator:
        workers, source = self._workers(), self._source
        if isinstance(source, Iterable):
            cursors = dict.fromkeys(workers, Cursor(Elements(lambda: source)))
        else:
            cursors: dict[int, Cursor] = {}
            for number, worker in enumerate(workers):
                context = InputContext(len(workers), number, self._num_replicas)
                make = functools.partial(source, context)
                cursors[worker] = Cursor(self._open_data(worker, make))
        self._cursors.update(cursors.values())
        return PerWorkerIterator(cursors)


def require_source(fn_or_dataset: object, at: str) -> None:
    """Raises unless these are arguments of `create_per_worker_dataset`."""
    require(
        isinstance(fn_or_dataset, Iterable) or callable(fn_or_dataset),
        "create_per_worker_dataset needs a function of an InputContext, or a dataset",
        got=describe_value(fn_or_dataset),
        why="each worker draws elements of what it gives",
        fix="coordinator.create_per_worker_dataset(lambda context: batches("
        "context.input_pipeline_id))",
        error=TypeError,
    )
    require(
        at in ("worker", "coordinator"),
        'create_per_worker_dataset needs at="worker" or at="coordinator"',
        got=f"at={at!r}",
        why="it says where the function is called",
        fix='at="worker"',
    )
