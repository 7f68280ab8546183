"""DistributedDataset: a user's iterable whose elements lie on the replicas."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src.data.input_layout import InputLayout
from distjax._src.data.iterator import DistributedIterator
from distjax._src.data.options import OWN, InputContext, InputOptions, as_input_options
from distjax._src.data.reader import Epochs, Reader
from distjax._src.data.splitting import GlobalBatches, ReplicaElements, Splitter
from distjax._src.placement import Topology
from distjax._src.replica.arguments import require_callable
from distjax._src.typing import DatasetLike
from distjax.errors import describe_value, message


class DistributedDataset:
    """A dataset whose elements lie on the replicas.

    Every ``iter(dataset)`` iterates the user's iterable afresh; before that, the iterable's
    ``set_epoch(n)`` is called if it has one, with n = 0, 1, ... It has a length if that has one;
    with ``partial="drop"`` all batches but the last are assumed to be of full size, except in a
    list, where all are examined.

    Source: tf.distribute.DistributedDataset.
    """

    def __init__(
        self, dataset: DatasetLike, splitter: Splitter, layout: InputLayout, options: InputOptions
    ):
        self._epochs = Epochs(dataset)
        self._dataset: Any = dataset  # it need not have a length, nor `__getitem__`
        splitter.require_splittable(self._dataset)
        self._splitter = splitter
        self._layout = layout
        self._options = options
        self._going_on: DistributedIterator | None = None  # one that a later loop goes on with

    def __iter__(self) -> DistributedIterator:
        if self._going_on is not None and not self._going_on.is_closed:
            return self._going_on
        reader = Reader.at_the_beginning(self._epochs, self._splitter.pull)
        iterator = DistributedIterator(reader, self._layout, self._options)
        # As `iter(generator)` is the generator: what was read ahead of a loop comes in the next.
        self._going_on = iterator if inspect.isgenerator(self._dataset) else None
        return iterator

    def __len__(self) -> int:
        return self._splitter.count(self._dataset)

    def __bool__(self) -> bool:
        return True  # a dataset need not have a length

    def __repr__(self) -> str:
        kind = type(self._dataset).__name__
        return f"DistributedDataset({kind}, {self._splitter}, prefetch={self._options.prefetch})"


def distribute_dataset(
    topology: Topology | None, dataset: DatasetLike, options: object
) -> DistributedDataset:
    """Returns global batches split over the replicas of `topology`.

    See `Strategy.distribute_dataset`. Without a topology there is one replica,
    placed by JAX.
    """
    method = "distribute_dataset"
    options = as_input_options(options, method)
    _require_iterable(dataset, f"{method} needs an iterable of batches")
    _require_no_fields(dataset, method)
    layout = InputLayout(topology, options.copy, options.shard == OWN)
    splitter = GlobalBatches(layout.num_rows, options.partial)
    distributed = DistributedDataset(dataset, splitter, layout, options)
    _require_no_features(dataset, method)  # after the error for rows that R does not divide
    return distributed


def distribute_datasets_from_function(
    topology: Topology | None, fn: Callable[[InputContext], Iterable[Any]], options: object
) -> DistributedDataset:
    """Returns the elements of ``fn(InputContext)``, one per replica and step.

    See `Strategy.distribute_datasets_from_function`.
    """
    method = "distribute_datasets_from_function"
    options = as_input_options(options, method)
    require_callable(fn, method)
    layout = InputLayout(topology, options.copy, is_own=True)
    dataset = fn(_input_context(topology))
    _require_iterable(dataset, f"{method} needs a function that returns an iterable")
    splitter = ReplicaElements(layout.num_rows, options.partial, options.copy)
    return DistributedDataset(dataset, splitter, layout, options)


def loops_plainly(dataset: DatasetLike) -> bool:
    """Returns whether a Python loop over a dataset reads what its `DistributedDataset` would.

    Not if it would go on beyond the dataset's length, would not call `set_epoch`, or would find
    nothing in a second epoch, in silence.
    """
    if isinstance(dataset, (Mapping, str, bytes)):
        return True
    is_endless = not hasattr(dataset, "__iter__") and isinstance(dataset, Sized)
    has_epochs = callable(getattr(dataset, "set_epoch", None))
    return not (is_endless or has_epochs or hasattr(dataset, "__next__"))


def _input_context(topology: Topology | None) -> InputContext:
    if topology is None:
        return InputContext()
    if not topology.spans_processes:
        return InputContext(num_replicas_in_sync=topology.num_replicas)
    own = topology.processes.index(jax.process_index())
    return InputContext(len(topology.processes), own, topology.num_replicas)


def _require_iterable(dataset: object, expected: str) -> None:
    is_iterable = hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    if is_iterable and not isinstance(dataset, (Mapping, str, bytes)):
        return
    raise TypeError(
        message(
            expected,
            got=f"a {type(dataset).__name__} with keys {list(dataset)[:8]}"
            if isinstance(dataset, Mapping)
            else describe_value(dataset),
            why="each of its items is a batch or element: a tree of arrays",
            fix="[{'x': x[i : i + G], 'y': y[i : i + G]} for i in range(0, len(x), G)], or a "
            "loader or dataset object that gives such batches",
        )
    )


def _require_no_fields(dataset: object, method: str) -> None:
    fields = getattr(dataset, "_fields", None)
    if not isinstance(dataset, tuple) or fields is None:
        return
    raise TypeError(
        message(
            f"{method} needs an iterable of batches, not one tree of arrays",
            got=f"a {type(dataset).__name__}, a NamedTuple with the fields {list(fields)}",
            why="its items would be the batches: all of one field, then all of the next",
            fix="[x] if x is one batch; [jax.tree.map(lambda a: a[i : i + G], x) for i in "
            "range(0, N, G)] for batches of G of its N examples",
        )
    )


def _require_no_features(dataset: object, method: str) -> None:
    # A row of integers is a batch of labels or indices as often.
    is_array = isinstance(dataset, (np.ndarray, jax.Array))
    if not is_array or dataset.ndim != 2 or not jnp.issubdtype(dataset.dtype, jnp.floating):
        return
    raise TypeError(
        message(
            f"{method} needs an iterable of batches, not an array of examples",
            got=describe_value(dataset),
            why="each of its rows would be a batch, and the numbers of a row would be split over "
            "the replicas",
            fix="[x[i : i + G] for i in range(0, len(x), G)] for batches of G rows; list(x) if "
            "each row is a batch of numbers",
        )
    )
