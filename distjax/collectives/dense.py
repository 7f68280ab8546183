"""Rejects sparse arrays, which cannot be reduced over the replicas."""

from __future__ import annotations

import sys

import jax

from distjax.errors import describe_value, message
from distjax.typing import PyTree


def is_sparse(value: object) -> bool:
    """Returns whether `value` is a JAX sparse array; imports nothing."""
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(value, sparse.JAXSparse)


def require_dense(tree: PyTree, method: str) -> None:
    """Raises a NotImplementedError if a leaf of `tree` is a sparse array.

    JAX treats it as a pytree of data and indices; reducing those separately would be
    meaningless.
    """
    for leaf in jax.tree.leaves(tree, is_leaf=is_sparse):
        if is_sparse(leaf):
            raise NotImplementedError(
                message(
                    f"{method} needs dense arrays, not sparse ones",
                    got=describe_value(leaf),
                    why="the replicas' sparse arrays have indices of their own",
                    fix="x.todense() in the replica function, before it is returned or reduced",
                )
            )
