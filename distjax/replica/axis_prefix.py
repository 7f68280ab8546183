"""Axes given as a prefix of a pytree, such as `in_axes` and `out_axes`."""

from __future__ import annotations

from typing import Any

import jax

from distjax.typing import PyTree


def broadcast_axes(axes: PyTree, treedef: jax.tree_util.PyTreeDef) -> list[Any]:
    """Returns the axis of each leaf of a tree.

    Args:
      axes: a prefix of the tree.
      treedef: the tree's structure.

    Raises:
      ValueError: `axes` is not a prefix.
    """
    if not axes and not isinstance(axes, (tuple, list, dict)):  # 0 or None: the same everywhere
        return [axes] * treedef.num_leaves
    prefix = jax.tree.structure(axes, is_leaf=_is_none)
    leaves = jax.tree.leaves(axes, is_leaf=_is_none)
    return [
        axis
        for axis, subtree in zip(leaves, _subtrees(prefix, treedef), strict=True)
        for _ in range(subtree.num_leaves)
    ]


def _subtrees(
    prefix: jax.tree_util.PyTreeDef, full: jax.tree_util.PyTreeDef
) -> list[jax.tree_util.PyTreeDef]:
    """Returns the subtrees at the positions of the prefix's leaves."""
    if prefix.node_data() is None:
        return [full]
    if prefix.node_data() != full.node_data() or len(prefix.children()) != len(full.children()):
        raise ValueError(f"{_node_text(prefix)} where the tree has {_node_text(full)}")
    pairs = zip(prefix.children(), full.children(), strict=True)
    return [tree for child, of in pairs for tree in _subtrees(child, of)]


def _node_text(treedef: jax.tree_util.PyTreeDef) -> str:
    node = treedef.node_data()
    if node is None:
        return "a leaf" if treedef.num_leaves else "None"
    return f"a {node[0].__name__} of {len(treedef.children())}"


def _is_none(value: object) -> bool:
    return value is None
