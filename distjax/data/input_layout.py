"""InputLayout: how elements lie on the devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from distjax.data.elements import HostTree
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.placement.transfer import transfer_each
from distjax.typing import PyTree

_ALIGNMENT = 64  # bytes; XLA copies memory of the host that does not begin at a multiple


@dataclasses.dataclass(frozen=True)
class InputLayout:
    """Moves elements to the replicas.

    Attributes:
      topology: the replicas; None: one replica, wherever JAX puts its arrays.
      copies: whether what the source gave is copied before it is moved.
    """

    topology: Topology | None
    copies: bool = True

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
        arrays = transfer_each(leaves, sharding)
        return self.as_element(jax.tree.unflatten(tree.treedef, arrays))

    def to_steps(self, tree: HostTree) -> Any:
        """Returns leaves [K, R, B, ...] as a tree of arrays, moved in one transfer."""
        leaves = tree.leaves if self.num_replicas > 1 else [leaf[:, 0] for leaf in tree.leaves]
        return jax.tree.unflatten(tree.treedef, transfer_each(leaves, self._of_steps))

    def allocate(self, num_steps: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns host memory [K, *shape] that moves to the devices with no copy on the host.

        The part of each device is in one piece, and aligned: on CPU, arrays on the
        devices then keep this memory.

        Args:
          num_steps: K.
          shape: that of a leaf of one element, [R, B, ...].
          dtype: of the leaf.
        """
        if self.topology is None or self.topology.mesh is None:
            return _allocate_aligned((num_steps, *shape), dtype)
        num_replicas, *rest = shape
        return _allocate_aligned((num_replicas, num_steps, *rest), dtype).swapaxes(0, 1)

    @functools.cached_property
    def _of_steps(self) -> Sharding | None:
        if self.topology is None or self.topology.mesh is None or self.num_replicas == 1:
            return None if self.topology is None else self.topology.mirrored
        return NamedSharding(self.topology.mesh, PartitionSpec(None, self.topology.axis_name))

    def as_element(self, arrays: PyTree) -> Any:
        """Returns arrays [R, B, ...] as PerReplica; arrays [B, ...] of one replica as they are."""
        topology = self.topology
        if topology is None or topology.num_replicas == 1:
            return arrays
        return jax.tree.map(lambda array: PerReplica(array, topology), arrays)


def _allocate_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
