"""Descriptions of variables: where one lives, how many bytes it takes; its notebook view."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from distjax import jax_compat
from distjax.context import frames
from distjax.placement.topology import is_host_memory
from distjax.tables import Table, as_html, format_bytes
from distjax.variables.layouts import Layout
from distjax.variables.storage import hand_out
from distjax.variables.stored_variable import StoredVariable


def variable_html(variable: StoredVariable) -> str:
    """Returns a table of the variable's properties, placement and values."""
    if variable.storage is None or frames.current().state is not None:
        return as_html([Table(repr(variable))])
    described = describe_variable(variable)
    size = described.host_bytes or described.bytes_per_device
    facts = (
        ("lives", f"{described.placement}, {variable.strategy!r}"),
        ("bytes on host" if described.host_bytes else "bytes per device", format_bytes(size)),
        ("synchronization", described.synchronization),
        ("aggregation", described.aggregation),
        ("trainable", str(described.trainable)),
    )
    caption = f"Variable {variable.name!r} {described.dtype}{list(variable.shape)}"
    return as_html([Table(caption, (), facts + tuple(_values(variable)))])


def _values(variable: StoredVariable) -> list[tuple[str, str]]:
    value = variable.layout.from_stored(hand_out(variable.stored), variable.shape)
    if jax_compat.is_key_dtype(value.dtype) or not value.is_fully_addressable:
        return []
    host = np.asarray(value)
    with np.printoptions(threshold=20, edgeitems=3, precision=4):
        if variable.policy.stacked:
            return [(f"replica {r}", str(component)) for r, component in enumerate(host)]
        return [("value", str(host))]


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
