"""Taking user trees apart into arrays and Python objects, and back."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from distjax.errors import describe_value, explain
from distjax.placement.per_replica import PerReplica, is_per_replica


def is_array(value: object) -> bool:
    """Returns whether `value` is an array that a program can take as it is."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def is_number(value: object) -> bool:
    """Returns whether `value` is a Python number."""
    return isinstance(value, numbers.Number) and not isinstance(value, np.generic)


class Static:
    """A Python object among array leaves: part of the tree, not of the data."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(self.value == other.value)


jax.tree_util.register_pytree_node(Static, lambda s: ((), s), lambda s, _: s)


class Template:
    """A tree in which some leaves are arrays, and the rest Python objects.

    Args:
      tree: a user's tree.
      takes: says which leaves are data (PerReplica leaves always are).

    Attributes:
      leaves: the data leaves, in order.
      paths: their paths, in the same order.
    """

    def __init__(self, tree: Any, takes: Callable[[Any], bool]):
        pairs, self._treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_leaf)
        self._all = [leaf.value if isinstance(leaf, Static) else leaf for _, leaf in pairs]
        taken = [isinstance(leaf, PerReplica) or takes(leaf) for _, leaf in pairs]
        self._where = [i for i, t in enumerate(taken) if t]
        self.leaves = [self._all[i] for i in self._where]
        self.paths = [jax.tree_util.keystr(pairs[i][0]) for i in self._where]
        for i in self._where:
            self._all[i] = None

    def fill(self, leaves: Sequence[Any]) -> Any:
        """Returns the tree with `leaves` in the places of the data leaves."""
        if len(self._where) == len(self._all):
            return jax.tree_util.tree_unflatten(self._treedef, leaves)
        filled = list(self._all)
        for i, leaf in zip(self._where, leaves, strict=True):
            filled[i] = leaf
        return jax.tree_util.tree_unflatten(self._treedef, filled)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Static) or is_per_replica(value)


def hide_objects(tree: Any) -> Any:
    """Returns `tree` with every leaf that is neither array nor number made Static.

    Raises:
      ValueError: a Python object that cannot be hashed.
    """

    def hide(path: Any, leaf: Any) -> Any:
        if is_array(leaf) or is_number(leaf) or is_per_replica(leaf) or isinstance(leaf, Static):
            return leaf
        try:
            hash(leaf)
        except TypeError:
            raise ValueError(
                explain(
                    f"argument {jax.tree_util.keystr(path)} needs an array, a number or a hashable "
                    "object",
                    got=describe_value(leaf),
                    why="a Python object is part of what a compiled program is looked up by",
                    fix="make the object hashable, or pass its arrays",
                )
            ) from None
        return Static(leaf)

    return jax.tree_util.tree_map_with_path(hide, tree, is_leaf=_is_leaf)


def require_args(args: Any, kwargs: Any, method: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args as a tuple and kwargs as a dict, or raises a ValueError."""
    if not isinstance(args, (tuple, list)):
        raise ValueError(
            explain(
                f"{method}: positional args must be a list or tuple",
                got=describe_value(args),
                why="each item is one positional argument of the function",
                fix=f"{method}(fn, args=(x,)): note the comma",
            )
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ValueError(
            explain(
                f"{method}: kwargs must be a dict",
                got=describe_value(kwargs),
                why="each item is one keyword argument of the function",
                fix=f"{method}(fn, kwargs={{'x': x}})",
            )
        )
    return tuple(args), dict(kwargs or {})


def function_name(fn: Any) -> str:
    """Returns the user's name of a function."""
    return getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__


def argument_names(fn: Any, count: int) -> list[str]:
    """Returns the parameter names of the first `count` positional arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    names = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]
