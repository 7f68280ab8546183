"""What a pytree holds, found without flattening or rebuilding it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

from distjax._src.typing import PyTree


def first_leaf(tree: PyTree) -> Any:
    """Returns one leaf of a tree, or None if it has none.

    Cost: under a microsecond if only tuples, lists and dicts lead to a `jax.Array`.
    """
    node: Any = tree
    while type(node) in (tuple, list, dict) and node:
        node = next(iter(node.values() if type(node) is dict else node))
    return node if isinstance(node, jax.Array) else next(iter(jax.tree.leaves(tree)), None)


def nodes_of(treedef: jax.tree_util.PyTreeDef) -> Iterator[tuple[type, Any]]:
    """Yields the class and the aux data of each node of a tree that is not a leaf."""
    ahead = [treedef]  # no recursion: trees may be deep
    while ahead:
        part = ahead.pop()
        node = part.node_data()
        if node is not None:
            yield node
        ahead.extend(part.children())
