"""Elements for one replica each, of which R consecutive ones make a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from distjax.data.elements import HostTree, checksum_of, leaf_path, read_element
from distjax.data.options import DROP, ERROR, PAD, Partial
from distjax.data.source import find_length, size_text
from distjax.data.splitting import (
    Position,
    Splitter,
    as_batch,
    find_sizes,
)
from distjax.errors import BatchError, message
from distjax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class ReplicaElements(Splitter):
    """Stacks R elements of the source to [R, ...]; nothing is split or rebatched.

    Attributes:
      num_replicas: R.
      partial: what to do with a step that has missing or smaller elements.
      copies: whether an element is copied before the next one is read.
    """

    num_replicas: int
    partial: Partial
    copies: bool = dataclasses.field(default=True, repr=False)

    def pull(self, source: Iterator[Any], position: Position) -> tuple[HostTree, Position]:
        former, dropped = position, None
        while True:
            first = position.consumed
            elements = self._next_elements(source, first)
            if not elements:
                raise StopIteration
            full = elements[0].leading_size if position.full_size is None else position.full_size
            sizes = [element.leading_size for element in elements]
            if former.is_resumed and full is not None:
                self._require_as_saved(sizes, full, first, dropped)
            checksum = checksum_of(elements[-1])
            position = Position(first + len(elements), full, checksum=checksum)
            if self.partial == ERROR:
                self._require_complete(
                    len(elements), f"elements {first} to {position.consumed - 1}"
                )
            self._require_fits(sizes, full, first)
            if self.partial == PAD:
                example = self._example(elements, sizes) or former.example
                return self._pad(elements, full, first, example), position._replace(example=example)
            if self.partial == ERROR or sizes == [full] * self.num_replicas:
                return _stack_elements(elements, first), position
            dropped = sizes

    def _example(self, elements: list[HostTree], sizes: list[int | None]) -> HostTree | None:
        """Returns the last example among `elements`; None: they have none, or no rows."""
        filled = [element for element, size in zip(elements, sizes, strict=True) if size]
        return filled[-1].last_example() if filled else None

    def _next_elements(self, source: Iterator[Any], first: int) -> list[HostTree]:
        elements: list[HostTree] = []
        for i in range(self.num_replicas):
            try:
                element = next(source)
            except StopIteration:
                break
            tree = read_element(element, f"element {first + i}")
            elements.append(tree.copy() if self.copies else tree)
        return elements

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
                message(
                    f"a step needs {self.num_replicas} elements, one per replica",
                    got=f"{present} in the last step ({name})",
                    why="all replicas run one program, and none may be without input",
                    fix="dj.InputOptions(partial='pad') to fill it up, with a mask; or "
                    "dj.InputOptions(partial='drop') to leave it out",
                )
            )

    def _require_as_saved(
        self, sizes: list[int | None], full: int, first: int, dropped: list[int | None] | None
    ) -> None:
        """Raises a BatchError if elements are not of the size that the saved state has."""
        for i, size in enumerate(sizes):
            if size is not None and (size > full or (sizes == dropped and size != full)):
                raise BatchError(size_text(f"element {first + i} needs", size, full))

    def _require_fits(self, sizes: list[int | None], full: int | None, first: int) -> None:
        if self.partial == ERROR or full is None:
            return
        for i, size in enumerate(sizes):
            if size is None or size > full:
                raise BatchError(
                    message(
                        f"element {first + i} needs a leading dimension of at most {full} with "
                        f"partial={self.partial!r}",
                        got="none common to its arrays" if size is None else str(size),
                        why="the first element sets the full size",
                        fix="yield elements of one size, the largest first",
                    )
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
        sizes = find_sizes(dataset) or []
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
        message(
            f"the elements of one step (from element {first} on) need one structure and one shape "
            "on all replicas",
            got=got,
            why="the values of the replicas are slices of one array [R, ...]",
            fix="yield elements of equal shapes; smaller ones are filled up by "
            "dj.InputOptions(partial='pad') where all arrays have a common leading dimension",
        )
    )
