"""Descriptions of variables: where one lives, how many bytes it takes; its notebook view."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np

from distjax._src import jax_compat
from distjax._src.placement import is_host_memory
from distjax._src.tables import Table, as_html, format_bytes
from distjax._src.typing import PyTree
from distjax._src.variables.layouts import Layout, found_layout


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
        "mirrored, each split P(None, 'model')" where the devices of a replica hold parts; for
        custom layouts, their `str`.
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
        placement=str(found_layout(layout, stored.sharding)),
        bytes_per_device=0 if is_on_host else shard_bytes,
        host_bytes=stored.size * itemsize if is_on_host else 0,
    )


def as_html_table(
    title: str,
    described: VariableDescription | None = None,
    strategy: str = "",
    value: PyTree = None,
    is_stacked: bool = False,
) -> str:
    """Returns a table of a variable's properties, placement and values.

    `title` stands for one without storage. The value is in global form; if `is_stacked`, it has a
    component per replica.
    """
    if described is None:
        return as_html([Table(title)])
    size = described.host_bytes or described.bytes_per_device
    facts = [
        ("lives", f"{described.placement}, {strategy}"),
        ("bytes on host" if described.host_bytes else "bytes per device", format_bytes(size)),
        ("synchronization", described.synchronization),
        ("aggregation", described.aggregation),
        ("trainable", str(described.trainable)),
    ]
    is_array = isinstance(value, jax.Array) and value.is_fully_addressable
    if is_array and not jax_compat.is_key_dtype(value.dtype):
        host = np.asarray(value)
        with np.printoptions(threshold=20, edgeitems=3, precision=4):
            if is_stacked:
                facts += [(f"replica {r}", str(component)) for r, component in enumerate(host)]
            else:
                facts.append(("value", str(host)))
    caption = f"Variable {described.name!r} {described.dtype}{list(described.shape)}"
    return as_html([Table(caption, (), tuple(facts))])
