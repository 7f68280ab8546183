"""The layout of one component per replica."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Sharding

from distjax.collectives.mapping import constrain_to_replicas
from distjax.placement import topology as kinds
from distjax.placement.topology import Topology
from distjax.variables.layouts.local_form import UnsplitForm
from distjax.variables.layouts.mirrored import MirroredLayout


@dataclasses.dataclass(frozen=True)
class StackedLayout:
    """One component per replica, [R, ...]: `P(replica)`."""

    topology: Topology
    kind = kinds.PER_REPLICA
    hands_out_copies = False

    def __str__(self) -> str:
        return "per replica"

    @property
    def num_copies(self) -> int:
        """R, the number of replicas."""
        return self.topology.num_replicas

    @property
    def sharding(self) -> Sharding:
        """`P(replica)`: split along the leading axis."""
        return self.topology.per_replica

    @property
    def local_form(self) -> UnsplitForm:
        """Each replica's own component."""
        return UnsplitForm(self.topology.num_replicas)

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns `stored`."""
        return stored

    def constrain(self, stored: jax.Array) -> jax.Array:
        """Returns `stored` with one slice on each replica."""
        return constrain_to_replicas(stored, self.topology, varying=True)

    def unencoded(self, shape: tuple[int, ...]) -> MirroredLayout:
        """Returns the mirrored layout, since a single value has no components."""
        return MirroredLayout(self.topology)
