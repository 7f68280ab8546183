"""Global batches [G, ...], split into [G / R, ...] for each replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from distjax.data.elements import HostTree, checksum_of, read_element, require_leading_size
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
class GlobalBatches(Splitter):
    """Reshapes each batch of the source to [R, B, ...].

    Attributes:
      num_replicas: R.
      partial: "error", "drop" or "pad" (see `InputOptions`).
    """

    num_replicas: int
    partial: Partial

    def pull(self, source: Iterator[Any], position: Position) -> tuple[HostTree, Position]:
        former, dropped = position, None
        while True:
            name = f"batch {position.consumed}"
            batch = read_element(next(source), name)
            size = require_leading_size(batch, name)
            full = size if position.full_size is None else position.full_size
            if former.is_resumed and (size > full or size == dropped):
                raise BatchError(size_text(f"{name} needs", size, full))
            self._require_fits(size, full, name)
            position = Position(position.consumed + 1, full, checksum=checksum_of(batch))
            if self.partial == PAD:
                example = batch.last_example() if size else former.example
                return self._pad(batch, full, example), position._replace(example=example)
            if self.partial == ERROR or size == full:
                return self._split(batch, size), position
            dropped = size

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
                message(
                    f"{name} needs at most {full} examples with partial={self.partial!r}",
                    got=f"{size} examples",
                    why="the first batch sets the full size",
                    fix="put the largest batch first, or pass dj.InputOptions(partial='error')",
                )
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
            message(
                f"{name} needs a number of examples that {r} replicas divide",
                got=f"{size} examples: {size // r} per replica and {size % r} left over",
                why="all replicas run one program, so their batches have one shape",
                fix="dj.InputOptions(partial='pad') for batches filled up, with a mask; or "
                + other,
            )
        )

    def require_splittable(self, dataset: Sequence[PyTree]) -> None:
        if self.partial == ERROR:
            sizes = find_sizes(dataset) or []
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
        sizes = find_sizes(dataset)
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
