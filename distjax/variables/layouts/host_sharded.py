"""The layout of one value in host memory that keeps its shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Sharding

from distjax.placement import topology as kinds
from distjax.placement.topology import Topology
from distjax.placement.transfer import transfer
from distjax.variables.layouts.local_form import WHOLE
from distjax.variables.layouts.shards import AxisShards


@dataclasses.dataclass(frozen=True)
class HostShardedLayout:
    """One value [...] in host memory, split along `axis` over the host's devices.

    For arrays that must keep their shape, such as those of Flax variables. `HostLayout`
    stores values flat, and so needs no axis that R divides.
    """

    topology: Topology
    axis: int
    memory_kind: str
    kind = kinds.HOST
    num_copies = 1
    local_form = WHOLE
    hands_out_copies = True

    def __str__(self) -> str:
        return "host memory"

    @property
    def sharding(self) -> Sharding:
        """Split along the axis, in host memory."""
        return self._on_devices.with_memory_kind(self.memory_kind)

    @property
    def _on_devices(self) -> Any:
        return AxisShards(self.topology, self.axis).sharding

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value` in host memory."""
        return transfer(transfer(value, self._on_devices), self.sharding)

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns the value, copied to each device."""
        return transfer(transfer(stored, self._on_devices), self.topology.mirrored)

    def constrain(self, stored: jax.Array) -> Any:
        """Returns `stored`, which `to_stored` has already placed."""
        return stored

    def unencoded(self, shape: tuple[int, ...]) -> HostShardedLayout:
        """Returns this layout."""
        return self
