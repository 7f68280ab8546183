"""Flattens a tree to leaves by key, and rebuilds it from the value at each key."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax

from distjax import jax_compat
from distjax.checkpoint.leaves import Leaf, VariableLeaf, make_leaf
from distjax.checkpoint.state_objects import inside_of, is_nnx, is_node, setting_of
from distjax.context import frames
from distjax.errors import CheckpointError, ContextError, message
from distjax.replica.partitioned_tree import is_array_or_struct
from distjax.replica.static import is_module
from distjax.typing import PyTree

#: Rebuilds a tree from the value at each key.
_Rebuild = Callable[[Mapping[str, Any]], Any]

#: The key of a tree that is a single leaf.
_ROOT_KEY = "value"


@dataclasses.dataclass(frozen=True)
class Tree:
    """The leaves of a tree by key, in order, and how to rebuild the tree.

    Attributes:
      leaves: the leaves by key.
      rebuilt: returns the tree, given the value at each key.
    """

    leaves: dict[str, Leaf]
    rebuilt: _Rebuild


def as_tree(value: PyTree, method: str) -> Tree:
    """Returns the leaves of a pytree, including those inside NNX and distjax objects.

    Keys are paths joined by "/": ``{"model": [w]}`` has ``model/0``. A variable
    and an array at one place have the same key.

    Args:
      value: the tree.
      method: "save" or "restore", for error texts.

    Raises:
      ContextError: in a replica function or a trace.
      CheckpointError: two leaves with one key, or a leaf of no known kind.
      AggregationError: a variable whose components have no single value.
    """
    _require_outside(method)
    leaves: list[Leaf] = []
    rebuilt = _visit("", value, leaves)
    counts = collections.Counter(leaf.key for leaf in leaves)
    repeated = sorted(key for key, count in counts.items() if count > 1)
    if repeated:
        raise CheckpointError(
            message(
                "the tree needs a key of its own for each leaf",
                got=f"several leaves at {', '.join(repeated)}",
                why='a key is the path to the leaf joined by "/", so {"a/b": x, "a": {"b": y}} '
                "has one key for two",
                fix='rename the dict key that has a "/" in it',
            )
        )
    for leaf in leaves:
        if isinstance(leaf, VariableLeaf):
            leaf.require_one_value(method)
    return Tree({leaf.key: leaf for leaf in leaves}, rebuilt)


def _visit(prefix: str, value: PyTree, leaves: list[Leaf], setting: str = "") -> _Rebuild:
    """Appends the leaves of `value`; returns a function that rebuilds it by key.

    Args:
      prefix: the key of `value`.
      value: a part of the tree.
      leaves: the leaves before it; appended to.
      setting: the setting that its values depend on: see `setting_of`.
    """
    is_leaf = lambda x: is_node(x) or (is_module(x) and x is not value)
    paths, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
    parts = [
        _visit_node(_join_path(prefix, path), node, leaves, setting, in_module=is_module(value))
        for path, node in paths
    ]
    return lambda values: jax.tree.unflatten(structure, [part(values) for part in parts])


def _visit_node(
    key: str, node: PyTree, leaves: list[Leaf], setting: str, *, in_module: bool
) -> _Rebuild:
    if is_module(node):
        return _visit(key, node, leaves, setting)
    if is_nnx(node):
        return _visit_nnx(key, node, leaves)
    inside = inside_of(node)
    if inside is not None:
        parts = [
            _visit(
                "/".join(part for part in (key, name) if part),
                child,
                leaves,
                setting_of(node, name) or setting,
            )
            for name, child in inside
        ]
        # Its contents are restored in place.
        return lambda values: ([part(values) for part in parts], node)[1]
    # As in the arguments of `run`: what is not an array in an Equinox module is part of its code.
    if in_module and not (is_array_or_struct(node) or is_node(node)):
        return lambda values: node
    leaf = make_leaf(key or _ROOT_KEY, node, setting)
    leaves.append(leaf)
    return lambda values: values[leaf.key]


def _visit_nnx(key: str, node: PyTree, leaves: list[Leaf]) -> _Rebuild:
    """Visits the state of an NNX object (module, Rngs, ...), restored in place."""
    nnx = sys.modules["flax.nnx"]
    state = node if isinstance(node, nnx.State) else nnx.state(node)
    held = lambda x: x.get_raw_value() if isinstance(x, nnx.Variable) else x  # bypass its hooks
    inside = _visit(key, nnx.to_pure_dict(state, held), leaves)

    def rebuilt(values: Mapping[str, Any]) -> Any:
        nnx.replace_by_pure_dict(state, inside(values))
        if node is not state:
            nnx.update(node, state)
        return node

    return rebuilt


def _join_path(prefix: str, path: tuple[Any, ...]) -> str:
    own = jax.tree_util.keystr(path, simple=True, separator="/")
    return "/".join(part for part in (prefix, own) if part)


def _require_outside(method: str) -> None:
    frame = frames.current()
    if not frame.is_replica and frame.state is None and not jax_compat.tracing():
        return
    raise ContextError(
        message(
            f"{method} needs to be called outside of replica functions and traces",
            got=frame.name
            if frame.is_replica
            else "a trace (dj.jit, a merge function, jax.jit, ...)",
            why="a traced function runs once, and its values exist only when its program has run",
            fix=f"for x in dataset: strategy.run(step, args=(x,)); checkpointer.{method}(...) "
            "between steps",
        )
    )
