"""Descriptions of variables: where one lives, and how many bytes it takes."""

from __future__ import annotations

import dataclasses
import math

import jax

from distjax.placement.topology import is_host_memory
from distjax.variables.layouts.layout import Layout
from distjax.variables.stored_variable import StoredVariable


@dataclasses.dataclass(frozen=True)
class VariableDescription:
    """Where one variable lives.

    Attributes:
      name: its name.
      shape: the shape of its value.
      dtype: its dtype, as a string.
      synchronization: the name of its VariableSynchronization.
      aggregation: the name of its VariableAggregation.
      trainable: whether it is trained.
      placement: "mirrored", "per replica", "partitioned on axis 0" or "host memory";
        for custom layouts, their `str`.
      bytes_per_device: bytes in the memory of each device; 0 if it is in host memory.
      host_bytes: bytes in host memory, over all its parts.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    synchronization: str
    aggregation: str
    trainable: bool
    placement: str
    bytes_per_device: int
    host_bytes: int


def describe_variable(variable: StoredVariable) -> VariableDescription:
    """Returns the description of a variable that has storage."""
    return describe_stored(
        variable.name,
        variable.storage,  # pyright: ignore[reportArgumentType]
        variable.layout,
        shape=variable.shape,
        synchronization=variable.synchronization.name,
        aggregation=variable.aggregation.name,
        trainable=variable.trainable,
    )


def describe_stored(
    name: str,
    stored: jax.Array,
    layout: Layout,
    *,
    shape: tuple[int, ...],
    synchronization: str,
    aggregation: str,
    trainable: bool,
) -> VariableDescription:
    """Returns the description of a value of `shape` whose stored array is `stored`."""
    itemsize = stored.dtype.itemsize
    is_on_host = is_host_memory(stored.sharding)
    shard_bytes = math.prod(stored.sharding.shard_shape(stored.shape)) * itemsize
    return VariableDescription(
        name=name,
        shape=tuple(shape),
        dtype=str(stored.dtype),
        synchronization=synchronization,
        aggregation=aggregation,
        trainable=trainable,
        placement=str(layout),
        bytes_per_device=0 if is_on_host else shard_bytes,
        host_bytes=stored.size * itemsize if is_on_host else 0,
    )
