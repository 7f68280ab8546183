"""The first leaf of a pytree, found without flattening it where possible."""

from __future__ import annotations

from typing import Any

import jax

from distjax.typing import PyTree


def first_leaf(tree: PyTree) -> Any:
    """Returns one leaf of a tree, or None if it has none.

    Cost: under a microsecond if only tuples, lists and dicts lead to a `jax.Array`.
    """
    node: Any = tree
    while type(node) in (tuple, list, dict) and node:
        node = next(iter(node.values() if type(node) is dict else node))
    return node if isinstance(node, jax.Array) else next(iter(jax.tree.leaves(tree)), None)
