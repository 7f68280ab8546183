"""Block: elements on the host, stacked as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from distjax.data.elements import HostTree

# Room for all K elements costs nothing, since the system gives memory when it is first
# written. But K may be far more than the data has: beyond this size blocks grow.
_FIRST_BYTES = 2**28

#: From a number of steps, and the shape [R, B, ...] and dtype of a leaf, to host memory.
Allocate = Callable[[int, tuple[int, ...], np.dtype], np.ndarray]


class HostElement(NamedTuple):
    """One element on the host, and the state of the stream after it.

    Attributes:
      tree: leaves [R, B, ...].
      state: see `HostStream.state`.
    """

    tree: HostTree
    state: dict[str, Any]


class Block:
    """Up to K elements of one shape: an array [K, R, B, ...] for each leaf.

    Every element is copied once, to its place among the others. Its memory is never
    filled twice: on CPU, arrays on the devices keep it.

    Args:
      limit: K.
      allocate: makes the memory.
    """

    def __init__(self, limit: int, allocate: Allocate):
        self._limit, self._allocate = limit, allocate
        self._signature: tuple[Any, ...] | None = None
        self._room = 0
        self._memory: list[np.ndarray] = []
        self._states: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._states)

    @property
    def is_full(self) -> bool:
        """Whether it has K elements."""
        return len(self) == self._limit

    @property
    def last_state(self) -> dict[str, Any]:
        """The state of the stream after the last element."""
        return self._states[-1]

    @property
    def tree(self) -> HostTree:
        """All elements, leaves [k, R, B, ...]."""
        return HostTree(self._treedef, [memory[: len(self)] for memory in self._memory])

    @property
    def elements(self) -> list[HostElement]:
        """The elements one by one, in the block's memory."""
        return [
            HostElement(HostTree(self._treedef, [memory[k] for memory in self._memory]), state)
            for k, state in enumerate(self._states)
        ]

    def takes(self, tree: HostTree) -> bool:
        """Returns whether `tree` can be stacked on what there is."""
        return self._signature is None or self._signature == tree.signature

    def append(self, element: HostElement) -> None:
        """Copies one more element, one that the block takes."""
        tree, k = element.tree, len(self)
        if k == self._room:
            self._make_room(tree)
        for memory, leaf in zip(self._memory, tree.leaves, strict=True):
            memory[k] = leaf
        self._states.append(element.state)

    def _make_room(self, tree: HostTree) -> None:
        if self._signature is None:
            self._signature, self._treedef = tree.signature, tree.treedef
        num_bytes = max(1, sum(leaf.nbytes for leaf in tree.leaves))
        self._room = min(self._limit, 2 * self._room or max(1, _FIRST_BYTES // num_bytes))
        former = self._memory
        self._memory = [self._allocate(self._room, x.shape, x.dtype) for x in tree.leaves]
        for new, old in zip(self._memory, former, strict=False):  # there is none at first
            new[: len(self)] = old
