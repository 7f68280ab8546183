"""User pytrees partitioned into arrays and Python objects, and recombined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from distjax.errors import describe_value, message
from distjax.placement.per_replica import PerReplica
from distjax.replica.user_names import user_path
from distjax.typing import PyTree
from distjax.variables.conversion import is_number


def is_array(value: object) -> bool:
    """Returns whether `value` is an array that a program can take directly."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_array_or_struct(value: object) -> bool:
    """Returns whether `value` is an array, or a struct that a program can be lowered for."""
    return is_array(value) or isinstance(value, jax.ShapeDtypeStruct)


class Static:
    """A Python object among array leaves; part of the treedef, not a leaf.

    Args:
      value: the object.
      is_implied: whether it is static only since it is no array: the user did not say so.
    """

    __slots__ = ("is_implied", "value")

    def __init__(self, value: object, is_implied: bool = False):
        self.value, self.is_implied = value, is_implied

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(self.value == other.value)


jax.tree_util.register_pytree_node(Static, lambda s: ((), s), lambda s, _: s)


class ObjectStateKey:
    """The key, in a tree path, of an array that belongs to a stateful object.

    Args:
      index: its index among the arrays of that object.
    """

    def __init__(self, index: int):
        self._index = index

    def __str__(self) -> str:
        return f".{_OBJECT_STATE}{self._index}>"


_OBJECT_STATE = "<state "


def is_object_state(path: str) -> bool:
    """Returns whether a path leads to an array of a stateful object."""
    return _OBJECT_STATE in path


class PartitionedTree:
    """A pytree partitioned into array leaves and Python objects.

    Args:
      tree: a user's pytree.
      takes: returns whether a leaf is data (PerReplica leaves always are).

    Attributes:
      leaves: the data leaves, in order.
      paths: their paths, in the same order.
      treedef: the structure of the whole tree.
    """

    def __init__(self, tree: PyTree, takes: Callable[[Any], bool]):
        pairs, self.treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_one_leaf)
        self._all: list[Any] = [
            leaf.value if isinstance(leaf, Static) else leaf for _, leaf in pairs
        ]
        taken = [isinstance(leaf, PerReplica) or takes(leaf) for _, leaf in pairs]
        self._where = [i for i, t in enumerate(taken) if t]
        self.leaves: list[Any] = [self._all[i] for i in self._where]
        self.paths = [jax.tree_util.keystr(pairs[i][0]) for i in self._where]
        for i in self._where:
            self._all[i] = None

    @property
    def is_of_arrays(self) -> bool:
        """Whether every leaf of the tree is data."""
        return len(self._where) == len(self._all)

    @property
    def objects(self) -> list[Any]:
        """The leaves that are not data."""
        taken = {*self._where}
        return [leaf for i, leaf in enumerate(self._all) if i not in taken]

    def take_leaves(self) -> list[Any]:
        """Returns the data leaves and drops them, so no tracer outlives its trace."""
        leaves, self.leaves = self.leaves, [None] * len(self.leaves)
        return leaves

    def combine(self, leaves: Sequence[Any]) -> Any:
        """Returns the tree with `leaves` in place of the data leaves."""
        return jax.tree_util.tree_unflatten(self.treedef, self.combine_leaves(leaves))

    def combine_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Returns all leaves of the tree, with `leaves` in place of the data leaves."""
        if self.is_of_arrays:
            return leaves
        combined = list(self._all)
        for i, leaf in zip(self._where, leaves, strict=True):
            combined[i] = leaf
        return combined


def is_static(value: object) -> bool:
    """Returns whether `value` is a Static; for use as ``is_leaf=``."""
    return isinstance(value, Static)


def is_one_leaf(value: object) -> bool:
    """Returns whether `value` counts as one leaf of a tree: a Static or a PerReplica."""
    return isinstance(value, (Static, PerReplica))


#: What to write in place of a static argument that is not hashable.
FIX_OF_UNHASHABLE = (
    "@jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays; without "
    "arrays: make it hashable"
)


def as_static(
    value: object, name: str, is_implied: bool = False, fix: str = FIX_OF_UNHASHABLE
) -> Static:
    """Returns an argument wrapped as part of a program's cache key.

    Args:
      value: the argument.
      name: the user's name of it, for the error.
      is_implied: whether the user did not say that it is static.
      fix: what to write in place of an argument that is not hashable.

    Raises:
      ValueError: it is not hashable.
    """
    try:
        hash(value)
    except TypeError:
        raise ValueError(
            message(
                f"argument {name} needs an array, a number or a hashable object",
                got=describe_value(value),
                why="a Python object is part of what a compiled program is looked up by",
                fix=fix,
            )
        ) from None
    return Static(value, is_implied)


def mark_static(
    tree: PyTree, names: Sequence[str] = (), is_data: Callable[[Any], bool] = is_array
) -> Any:
    """Returns `tree` with all leaves other than arrays and numbers made Static.

    Args:
      tree: (args, kwargs).
      names: names of the positional arguments, for the error.
      is_data: returns whether a leaf is an array.

    Raises:
      ValueError: a Python object is not hashable.
    """

    def hide(path: tuple[Any, ...], leaf: PyTree) -> Any:
        if is_data(leaf) or is_number(leaf) or is_one_leaf(leaf):
            return leaf
        return as_static(leaf, user_path(jax.tree_util.keystr(path), names), is_implied=True)

    return jax.tree_util.tree_map_with_path(hide, tree, is_leaf=is_one_leaf)
