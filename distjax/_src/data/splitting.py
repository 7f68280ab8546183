"""Splitter: turns elements of a source into elements [R, B, ...] for R replicas.

Two implementations: `GlobalBatches` are split, of `ReplicaElements` R are stacked.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import NoReturn

import jax
import numpy as np

from distjax._src.data.elements import (
    HostTree,
    as_batch,
    checksum_of,
    leaf_path,
    read_element,
    require_leading_size,
)
from distjax._src.data.options import DROP, ERROR, PAD, Partial
from distjax._src.data.reader import Numbered, Position, find_length
from distjax._src.typing import PyTree
from distjax.errors import BatchError, message


class Splitter(abc.ABC):
    """Turns elements of a source into one element for all replicas."""

    @abc.abstractmethod
    def pull(self, source: Numbered, position: Position) -> tuple[HostTree, Position]:
        """Returns the next element, leaves [R, B, ...], and the position after it.

        The source's elements are numbered. The arrays may be the source's memory: copy them before
        the next pull.
        """

    @abc.abstractmethod
    def require_splittable(self, dataset: Sequence[PyTree]) -> None:
        """Raises a BatchError if a sized dataset's items show that it cannot be split."""

    @abc.abstractmethod
    def count(self, dataset: Sequence[PyTree]) -> int:
        """Returns the number of elements for a dataset with a length, if that tells it."""


@dataclasses.dataclass(frozen=True)
class GlobalBatches(Splitter):
    """Reshapes each batch of the source to [R, B, ...]."""

    num_replicas: int
    partial: Partial

    def pull(self, source: Numbered, position: Position) -> tuple[HostTree, Position]:
        example = position.example
        while True:
            number, element = next(source)
            name = f"batch {number}"
            batch = read_element(element, name)
            size = require_leading_size(batch, name)
            full = size if position.full_size is None else position.full_size
            self._require_fits(size, full, name)
            position = position.after(number + 1, full, checksum_of(batch))
            if self.partial == PAD:
                example = batch.last_example() if size else example
                return self._pad(batch, full, example), position.with_example(example)
            if self.partial == ERROR or size == full:
                return self._split(batch, size), position

    def _pad(self, batch: HostTree, full: int, example: HostTree | None) -> HostTree:
        size = -(-full // self.num_replicas) * self.num_replicas
        mask = np.arange(size) < batch.leaves[0].shape[0]
        return self._split(as_batch(batch.filled(size, example), mask), size)

    def _split(self, batch: HostTree, size: int) -> HostTree:
        split = self.num_replicas, size // self.num_replicas
        return HostTree(batch.treedef, [x.reshape(split + x.shape[1:]) for x in batch.leaves])

    def _require_fits(self, size: int, full: int, name: str) -> None:
        if self.partial != ERROR and size > full:
            raise BatchError(
                f"{name} needs at most {full} examples with partial={self.partial!r}",
                got=f"{size} examples",
                why="the first batch sets the full size",
                fix="put the largest batch first, or pass dj.InputOptions(partial='error')",
            )
        divided = {ERROR: size, DROP: full, PAD: 0}[self.partial]
        if divided % self.num_replicas:
            self._refuse(name, divided, full)

    def _refuse(self, name: str, size: int, full: int, is_rows: bool = False) -> NoReturn:
        r = self.num_replicas
        other = "dj.InputOptions(partial='drop') to leave smaller batches out"
        if size == full:  # dropping would not help
            other = f"batches of {-(-size // r) * r} examples"
        if is_rows:
            other += "; [x] in place of an array x, of which each row is a batch"
        raise BatchError(
            f"{name} needs a number of examples that {r} replicas divide",
            got=f"{size} examples: {size // r} per replica and {size % r} left over",
            why="all replicas run one program, so their batches have one shape",
            fix="distribute_dataset(..., dj.InputOptions(partial='pad')), which pads batches "
            "and gives dj.Batch(data, mask); or " + other,
        )

    def require_splittable(self, dataset: Sequence[PyTree]) -> None:
        if self.partial == ERROR:
            sizes = _find_sizes(dataset) or []
            for i, size in enumerate(sizes):
                if size % self.num_replicas:
                    is_all = len(sizes) == find_length(dataset)
                    index = i if is_all or i == 0 else len(dataset) - 1
                    is_rows = isinstance(dataset, (np.ndarray, jax.Array))
                    self._refuse(f"batch {index} of {len(dataset)}", size, sizes[0], is_rows)

    def count(self, dataset: Sequence[PyTree]) -> int:
        length = len(dataset)
        if self.partial != DROP or not length or find_length(dataset) is None:
            return length
        sizes = _find_sizes(dataset)
        if sizes is None:
            raise TypeError(
                message(
                    "len() with partial='drop' needs a dataset that tells its batch sizes",
                    got=f"a {type(dataset).__name__} of {length} batches, with no sizes to look at",
                    why="how many batches are left depends on whether the last one is smaller",
                    fix="drop the smaller batch in the dataset itself, and use partial='error'",
                )
            )
        return length - sum(size < sizes[0] for size in sizes)


@dataclasses.dataclass(frozen=True)
class ReplicaElements(Splitter):
    """Stacks R elements of the source to [R, ...]; nothing is split or rebatched.

    With `copies`, an element is copied before the next one is read.
    """

    num_replicas: int
    partial: Partial
    copies: bool = dataclasses.field(default=True, repr=False)

    def pull(self, source: Numbered, position: Position) -> tuple[HostTree, Position]:
        example = position.example
        while True:
            elements, end = self._next_elements(source)
            if not elements:
                raise StopIteration
            first = end - len(elements)
            full = elements[0].leading_size if position.full_size is None else position.full_size
            sizes = [element.leading_size for element in elements]
            position = position.after(end, full, checksum_of(elements[-1]))
            if self.partial == ERROR:
                self._require_complete(len(elements), f"elements {first} to {end - 1}")
            self._require_fits(sizes, full, first)
            if self.partial == PAD:
                filled = [x for x, size in zip(elements, sizes, strict=True) if size]
                example = filled[-1].last_example() if filled else example
                padded = self._pad(elements, full, first, example)
                return padded, position.with_example(example)
            if self.partial == ERROR or sizes == [full] * self.num_replicas:
                return _stack_elements(elements, first), position

    def _next_elements(self, source: Numbered) -> tuple[list[HostTree], int]:
        """Returns up to R elements, and the number of the one that follows."""
        elements: list[HostTree] = []
        end = 0
        for number, element in itertools.islice(source, self.num_replicas):
            tree = read_element(element, f"element {number}")
            elements.append(tree.copy() if self.copies else tree)
            end = number + 1
        return elements, end

    def _pad(
        self, elements: list[HostTree], full: int | None, first: int, example: HostTree | None
    ) -> HostTree:
        missing = self.num_replicas - len(elements)
        if full is None:
            mask = np.arange(self.num_replicas) < len(elements)
        else:
            counts = [element.leaves[0].shape[0] for element in elements] + [0] * missing
            mask = np.arange(full) < np.array(counts)[:, None]
            elements = [
                e.filled(full, e.last_example() if n else example)
                for e, n in zip(elements, counts, strict=False)
            ]
        filled = elements + [elements[-1]] * missing
        return as_batch(_stack_elements(filled, first), mask)

    def _require_complete(self, present: int, name: str) -> None:
        if present < self.num_replicas:
            raise BatchError(
                f"a step needs {self.num_replicas} elements, one per replica",
                got=f"{present} in the last step ({name})",
                why="all replicas run one program, and none may be without input",
                fix="dj.InputOptions(partial='pad') to fill it up, with a mask; or "
                "dj.InputOptions(partial='drop') to leave it out",
            )

    def _require_fits(self, sizes: list[int | None], full: int | None, first: int) -> None:
        if self.partial == ERROR or full is None:
            return
        for i, size in enumerate(sizes):
            if size is None or size > full:
                raise BatchError(
                    f"element {first + i} needs a leading dimension of at most {full} with "
                    f"partial={self.partial!r}",
                    got="none common to its arrays" if size is None else str(size),
                    why="the first element sets the full size",
                    fix="yield elements of one size, the largest first",
                )

    def require_splittable(self, dataset: Sequence[PyTree]) -> None:
        length = find_length(dataset)
        if self.partial == ERROR and length:
            present = length % self.num_replicas or self.num_replicas
            self._require_complete(present, f"of {length} elements")

    def count(self, dataset: Sequence[PyTree]) -> int:
        length, r = len(dataset), self.num_replicas
        if self.partial != DROP:
            return -(-length // r)
        sizes = _find_sizes(dataset) or []
        if len(sizes) == length:
            steps = [sizes[i : i + r] for i in range(0, length - length % r, r)]
            return sum(set(step) == {sizes[0]} for step in steps)
        ends_smaller = length % r == 0 and sizes[:1] != sizes[-1:]
        return length // r - ends_smaller


def _stack_elements(elements: list[HostTree], first: int) -> HostTree:
    treedef = elements[0].treedef
    for r, element in enumerate(elements):
        if element.treedef != treedef:
            raise _differ(f"the structures {element.treedef} on replica {r}, {treedef} on 0", first)
        for i, (x, x0) in enumerate(zip(element.leaves, elements[0].leaves, strict=True)):
            if (x.shape, x.dtype) != (x0.shape, x0.dtype):
                path = leaf_path(treedef, i)
                ours, other = f"{x.dtype}{list(x.shape)}", f"{x0.dtype}{list(x0.shape)}"
                raise _differ(f"leaf {path}: {ours} on replica {r}, {other} on 0", first)
    columns = zip(*(element.leaves for element in elements), strict=True)
    return HostTree(treedef, [np.stack(column) for column in columns])


def _differ(got: str, first: int) -> BatchError:
    return BatchError(
        f"the elements of one step (from element {first} on) need one structure and one shape "
        "on all replicas",
        got=got,
        why="the values of the replicas are slices of one array [R, ...]",
        fix="yield elements of equal shapes; smaller ones are filled up by "
        "dj.InputOptions(partial='pad') where all arrays have a common leading dimension",
    )


def _find_sizes(dataset: Sequence[PyTree]) -> list[int] | None:
    """Returns the leading dimensions that `dataset` shows before it is iterated.

    All of them for a list or tuple; those of the first and last element if it has a
    length and items; None if a size cannot be determined (the loop then reports
    why).
    """
    length = find_length(dataset)
    if not length or not hasattr(dataset, "__getitem__"):
        return None
    is_list = isinstance(dataset, (list, tuple))
    indices = range(length) if is_list else sorted({0, length - 1})
    sizes = []
    for i in indices:
        try:
            element = dataset[i]
        except Exception:  # a source's own error should be raised in the loop
            return None
        sizes.append(_leading_size(element))
    return None if None in sizes else sizes


def _leading_size(element: PyTree) -> int | None:
    leaves = jax.tree.leaves(element)
    if leaves and all(hasattr(leaf, "shape") for leaf in leaves):
        sizes = {tuple(leaf.shape)[:1] for leaf in leaves}
        return int(sizes.pop()[0]) if len(sizes) == 1 and () not in sizes else None
    with contextlib.suppress(BatchError):
        return read_element(element, "an element").leading_size
    return None
