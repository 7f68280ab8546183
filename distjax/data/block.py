"""Block: elements on the host, stacked as they arrive."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from distjax.data.elements import HostTree

# Allocating all K elements costs nothing, since the system commits memory on first write.
# But K may far exceed the data, so beyond this size blocks grow.
_FIRST_BYTES = 2**28

#: Maps a number of steps, and a leaf's shape [R, B, ...] and dtype, to host memory.
Allocate = Callable[[int, tuple[int, ...], np.dtype], np.ndarray]


class HostElement(NamedTuple):
    """One element on the host, and the state of the stream after it.

    Attributes:
      tree: leaves [R, B, ...].
      state: see `HostStream.state`.
      state_before: the state before it.
    """

    tree: HostTree
    state: dict[str, Any]
    state_before: dict[str, Any]


class Block:
    """Up to K elements of one shape: an array [K, R, B, ...] for each leaf.

    Each element is copied once, to its place among the others. The memory is never
    refilled, because on CPU device arrays keep it.

    Args:
      first: the first element.
      limit: K.
      allocate: allocates the memory; None: reuse the first element's, with K = 1.
    """

    def __init__(self, first: HostElement, limit: int, allocate: Allocate | None):
        self._limit, self._allocate, self._treedef = limit, allocate, first.tree.treedef
        self._states = [first.state_before, first.state]
        leaves = first.tree.leaves
        if allocate is None:
            self._memory = [leaf[np.newaxis] for leaf in leaves]
            return
        num_bytes = max(1, sum(leaf.nbytes for leaf in leaves))
        room = min(limit, max(1, _FIRST_BYTES // num_bytes))
        self._memory = [allocate(room, leaf.shape, leaf.dtype) for leaf in leaves]
        self._write(0, leaves)

    def __len__(self) -> int:
        return len(self._states) - 1

    @property
    def state_before(self) -> dict[str, Any]:
        """The state of the stream before the first element."""
        return self._states[0]

    @property
    def last_state(self) -> dict[str, Any]:
        """The state of the stream after the last element."""
        return self._states[-1]

    @property
    def tree(self) -> HostTree:
        """All elements, leaves [k, R, B, ...]."""
        size = len(self)
        used = [memory if len(memory) == size else memory[:size] for memory in self._memory]
        return HostTree(self._treedef, used)

    def element(self, k: int) -> HostElement:
        """Returns an element, in the block's memory."""
        tree = HostTree(self._treedef, [memory[k] for memory in self._memory])
        return HostElement(tree, self._states[k + 1], self._states[k])

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
        self._states.append(element.state)
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
