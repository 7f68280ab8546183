"""From the host to the devices: K elements are copied into one memory, and moved at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from distjax._src import hooks, jax_compat
from distjax._src.data.elements import HostTree
from distjax._src.data.reader import HostElement, Position
from distjax._src.placement.per_replica import PerReplica
from distjax._src.placement.rows import note_batch
from distjax._src.placement.topology import Topology
from distjax._src.placement.transfer import transfer_each, transfer_local_rows
from distjax._src.typing import PyTree


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
        for array in jax.tree.leaves(arrays):
            if not isinstance(array, jax_compat.Tracer):
                note_batch(array)
        if topology.num_replicas == 1:
            hooks.tell(hooks.on_lone_value, arrays)
            return arrays
        return jax.tree.map(lambda array: PerReplica(array, topology), arrays)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Input of K steps, moved to the devices in one transfer.

    To process them in one compiled loop, scan over `arrays` and pass each step
    ``steps.as_element(slice)``, which equals what `next` would have returned.

    Attributes:
      num_steps: K.
      arrays: the structure of an element; leaves are arrays [K, R, B, ...] laid out
        over the replicas along their second dimension; [K, B, ...] if R is 1.
      layout: how elements lie on the devices.
    """

    num_steps: int
    arrays: Any
    layout: InputLayout

    def as_element(self, arrays: PyTree) -> Any:
        """Returns one step's slices [R, B, ...] of `arrays` as an element."""
        return self.layout.as_element(arrays)


@dataclasses.dataclass(frozen=True)
class Block:
    """K elements of one shape on the host.

    Its memory is never refilled, because on CPU device arrays keep it.

    Attributes:
      tree: all of them, leaves [K, R, B, ...].
      positions: the position behind each.
    """

    tree: HostTree
    positions: list[Position]

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def elements(self) -> list[HostElement]:
        """The elements one by one, in the block's memory."""
        return [
            HostElement(HostTree(self.tree.treedef, [leaf[k] for leaf in self.tree.leaves]), x)
            for k, x in enumerate(self.positions)
        ]

    @classmethod
    def of(cls, elements: Sequence[HostElement], *, copies: bool) -> Block:
        """Returns elements of one shape in memory of their own, or one in that which it has."""
        treedef, first = elements[0].tree
        columns = zip(*(element.tree.leaves for element in elements), strict=True)
        leaves = [np.stack(xs) for xs in columns] if copies else [x[np.newaxis] for x in first]
        return cls(HostTree(treedef, leaves), [element.position for element in elements])
