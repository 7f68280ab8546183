"""InputLayout: how elements lie on the devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from distjax.data.elements import HostTree
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology


@dataclasses.dataclass(frozen=True)
class InputLayout:
    """Moves elements to the replicas.

    Attributes:
      topology: the replicas; None: one replica, wherever JAX puts its arrays.
    """

    topology: Topology | None

    @property
    def num_replicas(self) -> int:
        """R."""
        return 1 if self.topology is None else self.topology.num_replicas

    def to_element(self, tree: HostTree) -> Any:
        """Returns leaves [R, B, ...] as one element on the devices, in one transfer."""
        leaves = tree.leaves if self.num_replicas > 1 else [leaf[0] for leaf in tree.leaves]
        sharding = None
        if self.topology is not None:
            is_one = self.num_replicas == 1
            sharding = self.topology.mirrored if is_one else self.topology.per_replica
        arrays = jax.device_put(leaves, sharding)
        return self.as_element(jax.tree.unflatten(tree.treedef, arrays))

    def to_steps(self, trees: Sequence[HostTree]) -> Any:
        """Returns K elements as a tree of arrays [K, R, B, ...], in one transfer."""
        columns = zip(*(tree.leaves for tree in trees), strict=True)
        leaves = [np.stack(column) for column in columns]
        if self.num_replicas == 1:
            leaves = [leaf[:, 0] for leaf in leaves]
        return jax.tree.unflatten(trees[0].treedef, jax.device_put(leaves, self._of_steps))

    @functools.cached_property
    def _of_steps(self) -> Sharding | None:
        if self.topology is None or self.topology.mesh is None or self.num_replicas == 1:
            return None if self.topology is None else self.topology.mirrored
        return NamedSharding(self.topology.mesh, PartitionSpec(None, self.topology.axis_name))

    def as_element(self, arrays: Any) -> Any:
        """Returns arrays [R, B, ...] as PerReplica; arrays [B, ...] of one replica as they are."""
        topology = self.topology
        if topology is None or topology.num_replicas == 1:
            return arrays
        return jax.tree.map(lambda array: PerReplica(array, topology), arrays)
