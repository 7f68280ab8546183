"""InputLayout: moves elements from host arrays to the devices, in one transfer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from distjax.data.elements import HostTree
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.placement.transfer import transfer_each, transfer_local_rows
from distjax.replica.hooks import hooks
from distjax.typing import PyTree

_ALIGNMENT = 64  # bytes; XLA copies host memory that is not aligned to this


@dataclasses.dataclass(frozen=True)
class InputLayout:
    """Moves elements to the replicas.

    Attributes:
      topology: the replicas; None: one replica, placed by JAX.
      copies: whether the source's data is copied before it is moved.
      is_own: whether each process supplies only its own replicas' rows.
    """

    topology: Topology | None
    copies: bool = True
    is_own: bool = False

    @property
    def num_replicas(self) -> int:
        """R."""
        return 1 if self.topology is None else self.topology.num_replicas

    @property
    def spans_processes(self) -> bool:
        """Whether the replicas span processes, which then compare what they read."""
        return self.topology is not None and self.topology.spans_processes

    @property
    def num_rows(self) -> int:
        """How many rows an element of this process has: one per replica that it reads for."""
        if self.topology is None or not self.is_own:
            return self.num_replicas
        return len(self.topology.local_replicas)

    def to_element(self, tree: HostTree) -> Any:
        """Returns leaves [R, B, ...] as one element on the devices, in one transfer."""
        if self._gives_own_rows:
            return self.as_element(self._from_own_rows(tree, axis=0))
        leaves = tree.leaves if self.num_replicas > 1 else [leaf[0] for leaf in tree.leaves]
        arrays = transfer_each(leaves, self._sharding(0))
        return self.as_element(jax.tree.unflatten(tree.treedef, arrays))

    def to_steps(self, tree: HostTree) -> Any:
        """Returns leaves [K, R, B, ...] as a tree of arrays, moved in one transfer."""
        if self._gives_own_rows:
            return self._from_own_rows(tree, axis=1)
        leaves = tree.leaves if self.num_replicas > 1 else [leaf[:, 0] for leaf in tree.leaves]
        return jax.tree.unflatten(tree.treedef, transfer_each(leaves, self._sharding(1)))

    def allocate(self, num_steps: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns host memory [K, *shape] that moves to the devices without a host copy.

        Each device's part is contiguous and aligned; on CPU, device arrays then keep
        this memory.

        Args:
          num_steps: K.
          shape: the shape of a leaf of one element, [R, B, ...].
          dtype: the dtype of the leaf.
        """
        if self.topology is None or self.topology.mesh is None:
            return _allocate_aligned((num_steps, *shape), dtype)
        num_replicas, *rest = shape
        return _allocate_aligned((num_replicas, num_steps, *rest), dtype).swapaxes(0, 1)

    @property
    def _gives_own_rows(self) -> bool:
        return self.is_own and self.spans_processes and self.num_replicas > 1

    def _from_own_rows(self, tree: HostTree, axis: int) -> Any:
        assert self.topology is not None, "it spans processes"
        arrays = [transfer_local_rows(leaf, self.topology, axis) for leaf in tree.leaves]
        return jax.tree.unflatten(tree.treedef, arrays)

    def _sharding(self, axis: int) -> Sharding | None:
        """Returns the sharding of a leaf whose `axis` runs over the replicas."""
        if self.topology is None:
            return None
        if self.num_replicas == 1:
            return self.topology.mirrored
        return self.topology.per_replica if axis == 0 else self.topology.split_along(axis)

    def as_element(self, arrays: PyTree) -> Any:
        """Returns arrays [R, B, ...] as PerReplica; one replica's [B, ...] unchanged."""
        topology = self.topology
        if topology is None:
            return arrays
        if topology.num_replicas == 1:
            hooks().on_lone_value(arrays)
            return arrays
        return jax.tree.map(lambda array: PerReplica(array, topology), arrays)


def _allocate_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
