"""The layout of one value with a copy on each replica."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Sharding

from distjax.collectives.mapping import constrain_to_replicas
from distjax.placement import topology as kinds
from distjax.placement.topology import Topology
from distjax.variables.layouts.local_form import WHOLE


@dataclasses.dataclass(frozen=True)
class MirroredLayout:
    """One value [...] with a copy on each replica: `P()`."""

    topology: Topology
    kind = kinds.MIRRORED
    local_form = WHOLE
    hands_out_copies = False

    def __str__(self) -> str:
        return "mirrored"

    @property
    def num_copies(self) -> int:
        """R, the number of replicas."""
        return self.topology.num_replicas

    @property
    def sharding(self) -> Sharding:
        """`P()`: replicated."""
        return self.topology.mirrored

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns `stored`."""
        return stored

    def constrain(self, stored: jax.Array) -> jax.Array:
        """Returns `stored`, with a copy on each replica."""
        return constrain_to_replicas(stored, self.topology, varying=False)

    def unencoded(self, shape: tuple[int, ...]) -> MirroredLayout:
        """Returns this layout."""
        return self
