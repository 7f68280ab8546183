"""From the host to the devices: K elements are filled into one memory, and moved at once."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from distjax._src import hooks, jax_compat
from distjax._src.data.elements import HostTree
from distjax._src.data.reader import HostElement
from distjax._src.placement import (
    PerReplica,
    Topology,
    note_batch,
    transfer_each,
    transfer_local_rows,
)
from distjax._src.typing import PyTree

_ALIGNMENT = 64  # bytes; XLA copies host memory that is not aligned to this
# Allocating all K elements costs nothing, since the system commits memory on first write.
# But K may far exceed the data, so beyond this size blocks grow.
_FIRST_BYTES = 2**28

#: Maps a number of steps, and a leaf's shape [R, B, ...] and dtype, to host memory.
Allocate = Callable[[int, tuple[int, ...], np.dtype], np.ndarray]


@dataclasses.dataclass(frozen=True)
class InputLayout:
    """Moves elements to the replicas of a topology; without one, to one replica placed by JAX.

    `copies`: the source's data is copied before it is moved. `is_own`: each process supplies only
    its own replicas' rows.
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

        Each device's part is contiguous and aligned; on CPU, device arrays then keep this memory.
        `shape` is that of a leaf of one element, [R, B, ...].
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
        for array in jax.tree.leaves(arrays):
            if not isinstance(array, jax_compat.Tracer):
                note_batch(array)
        if topology.num_replicas == 1:
            hooks.tell(hooks.on_lone_value, arrays)
            return arrays
        return jax.tree.map(lambda array: PerReplica(array, topology), arrays)


def _allocate_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


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


class Block:
    """Up to K elements of one shape: an array [K, R, B, ...] for each leaf.

    Each element is copied once, to its place among the others. The memory is never refilled,
    because on CPU device arrays keep it. Without `allocate` it is the first element's, and K is 1.
    """

    def __init__(self, first: HostElement, limit: int, allocate: Allocate | None):
        self._limit, self._allocate, self._treedef = limit, allocate, first.tree.treedef
        self.positions = [first.position]
        leaves = first.tree.leaves
        if allocate is None:
            self._memory = [leaf[np.newaxis] for leaf in leaves]
            return
        num_bytes = max(1, sum(leaf.nbytes for leaf in leaves))
        room = min(limit, max(1, _FIRST_BYTES // num_bytes))
        self._memory = [allocate(room, leaf.shape, leaf.dtype) for leaf in leaves]
        self._write(0, leaves)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def is_full(self) -> bool:
        """Whether it has K elements."""
        return len(self) == self._limit

    @property
    def tree(self) -> HostTree:
        """All elements, leaves [k, R, B, ...]."""
        size = len(self)
        used = [memory if len(memory) == size else memory[:size] for memory in self._memory]
        return HostTree(self._treedef, used)

    def element(self, k: int) -> HostElement:
        """Returns an element, in the block's memory."""
        tree = HostTree(self._treedef, [memory[k] for memory in self._memory])
        return HostElement(tree, self.positions[k])

    @property
    def elements(self) -> list[HostElement]:
        """The elements one by one, in the block's memory."""
        return [self.element(k) for k in range(len(self))]

    def add(self, element: HostElement) -> bool:
        """Copies one more element and returns True, or returns False if its shape differs."""
        tree, k = element.tree, len(self)
        if tree.signature != self._signature:
            return False
        if k == len(self._memory[0]):
            self._grow()
        self._write(k, tree.leaves)
        self.positions.append(element.position)
        return True

    @functools.cached_property
    def _signature(self) -> tuple[Any, list[Any]]:
        return self.element(0).tree.signature

    def _write(self, k: int, leaves: Sequence[np.ndarray]) -> None:
        for memory, leaf in zip(self._memory, leaves, strict=True):
            memory[k] = leaf

    def _grow(self) -> None:
        size = len(self)
        room = min(self._limit, 2 * size)
        former = self._memory
        assert self._allocate is not None  # with K = 1 nothing grows
        self._memory = [self._allocate(room, x.shape[1:], x.dtype) for x in former]
        for new, old in zip(self._memory, former, strict=True):
            new[:size] = old
