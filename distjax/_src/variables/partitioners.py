"""Partitioners: how many shards a variable is split into, by TensorFlow's rules."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from distjax._src.typing import DTypeLike
from distjax.errors import describe_value, message, require, require_int

#: (shape, dtype) -> number of shards along each axis.
Partitioner = Callable[[tuple[int, ...], Any], Sequence[int]]


def require_partitioner(owner: str, partitioner: object) -> None:
    """Raises a TypeError unless `partitioner` is callable or None."""
    require(
        partitioner is None or callable(partitioner),
        f"{owner}: partitioner needs a function of shape and dtype, or None",
        got=describe_value(partitioner),
        why="for each variable it decides into how many parts each axis is split",
        fix=f"dj.{owner}(partitioner=dj.parts.FixedShards(2))",
        error=TypeError,
    )


def count_shards(
    owner: str, partitioner: Partitioner, shape: tuple[int, ...], dtype: DTypeLike
) -> list[int]:
    """Returns how many shards a partitioner asks for along each axis, or raises a ValueError."""
    given: Any = partitioner(shape, dtype)
    shards = list(given) if isinstance(given, Iterable) else []
    is_count = lambda n: isinstance(n, (int, np.integer)) and n >= 0
    if len(shards) == len(shape) and all(map(is_count, shards)):
        return shards
    raise ValueError(
        message(
            f"{owner}: partitioner needs to return a number of shards for each axis",
            got=f"{describe_value(given)} for shape {shape}",
            why="the first axis with more than one shard is the one that is split",
            fix="partitioner=lambda shape, dtype: [2] + [1] * (len(shape) - 1)",
        )
    )


def _require_count(owner: str, name: str, value: object) -> None:
    why = "it bounds the number or the size of shards"
    require_int(f"{owner}: {name}", value, 1, why=why, fix=f"{owner}({name}=8)")


def _num_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _along_first_axis(shape: tuple[int, ...], num_shards: int) -> list[int]:
    return [num_shards, *(1 for _ in shape[1:])] if shape else []


@dataclasses.dataclass(frozen=True)
class FixedShards:
    """A fixed number of shards along the first axis, at most the size of that axis.

    Source: tf.distribute.experimental.partitioners.FixedShardsPartitioner.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_count("FixedShards", "num_shards", self.num_shards)

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike) -> list[int]:
        """Returns the number of shards along each axis."""
        return _along_first_axis(shape, min(self.num_shards, shape[0]) if shape else 1)


@dataclasses.dataclass(frozen=True)
class MinSize:
    """One shard per started `min_shard_bytes`, at most `max_shards`.

    As in TensorFlow, a shard may be slightly smaller than `min_shard_bytes`.

    Source: tf.distribute.experimental.partitioners.MinSizePartitioner.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _require_count("MinSize", "min_shard_bytes", self.min_shard_bytes)
        _require_count("MinSize", "max_shards", self.max_shards)

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike) -> list[int]:
        """Returns the number of shards along each axis."""
        if not shape:
            return []
        fitting = -(-_num_bytes(shape, dtype) // self.min_shard_bytes)
        return _along_first_axis(shape, max(1, min(fitting, self.max_shards, shape[0])))


@dataclasses.dataclass(frozen=True)
class MaxSize:
    """As few shards as possible of at most `max_shard_bytes` each.

    Source: tf.distribute.experimental.partitioners.MaxSizePartitioner.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _require_count("MaxSize", "max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            _require_count("MaxSize", "max_shards", self.max_shards)

    def __call__(self, shape: tuple[int, ...], dtype: DTypeLike) -> list[int]:
        """Returns the number of shards along each axis."""
        if not shape or shape[0] == 0:
            return _along_first_axis(shape, 1)
        row_bytes = max(1, _num_bytes(shape, dtype) // shape[0])
        rows = max(1, self.max_shard_bytes // row_bytes)
        needed = -(-shape[0] // rows)
        limit = shape[0] if self.max_shards is None else min(self.max_shards, shape[0])
        return _along_first_axis(shape, max(1, min(needed, limit)))
