"""The layout of one value split over the replicas along an axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Sharding

from distjax.placement import topology as kinds
from distjax.placement.topology import Topology
from distjax.variables.layouts.shards import AxisShards


@dataclasses.dataclass(frozen=True)
class PartitionedLayout:
    """One value [...] split over the replicas along `axis`; each holds a shard."""

    topology: Topology
    axis: int
    kind = kinds.PARTITIONED
    num_copies = 1
    hands_out_copies = False

    def __str__(self) -> str:
        return f"partitioned on axis {self.axis}"

    @property
    def sharding(self) -> Sharding:
        """`P(..., replica)` with the replica axis at `axis`."""
        return self.local_form.sharding

    @property
    def local_form(self) -> AxisShards:
        """Shards along the axis."""
        return AxisShards(self.topology, self.axis)

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns `stored`."""
        return stored

    def constrain(self, stored: jax.Array) -> Any:
        """Returns `stored` with one shard on each replica."""
        return self.local_form.spread(stored)

    def unencoded(self, shape: tuple[int, ...]) -> PartitionedLayout:
        """Returns this layout."""
        return self
