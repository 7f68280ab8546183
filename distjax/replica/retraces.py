"""Watching for a function that is compiled again and again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax

from distjax import jax_compat
from distjax.errors import RecompilationWarning, explain
from distjax.placement.per_replica import is_per_replica
from distjax.replica.arguments import Static, user_path

#: The number of compilations of one function at which a warning is given.
FIRST_WARNING = 8


class RetraceWatch:
    """Counts the signatures of one function and says what changed.

    Args:
      name: the user's name of the function.
      argument_names: the user's names of its positional arguments.
    """

    def __init__(self, name: str, argument_names: Sequence[str] = ()):
        self._name, self._argument_names = name, argument_names
        self._count = 1
        self._warn_at = FIRST_WARNING
        self._last: dict[str, str] = {}

    def saw(self, tree: Any) -> None:
        """Records one more compilation; warns at 8, 16, 32, ..."""
        self._count += 1
        before, self._last = self._last, _describe(tree, self._argument_names)
        if self._count < self._warn_at:
            return
        self._warn_at *= 2
        changed = [
            f"{path}: {before.get(path, 'absent')} -> {now}"
            for path, now in self._last.items()
            if before.get(path) != now
        ]
        warnings.warn(
            explain(
                f"{self._name} is compiled for the {self._count}th time and needs arguments of "
                "steady shape",
                got=f"a change of {'; '.join(changed[:4]) or 'the tree of arguments'}",
                why="each new shape, dtype or Python value is a program of its own",
                fix="pad batches to one shape, and pass numbers that change as arrays",
            ),
            RecompilationWarning,
            stacklevel=jax_compat.user_stacklevel(),
        )


def _describe(tree: Any, names: Sequence[str]) -> dict[str, str]:
    donated, (args, kwargs) = tree
    rows = {}
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=_is_leaf)
    for path, leaf in leaves:
        name = f"argument {user_path(jax.tree_util.keystr(path), names)}"
        rows[name] = _describe_leaf(leaf)
    for index, leaf in enumerate(jax.tree.leaves(donated)):
        rows[f"donated array {index}"] = _describe_leaf(leaf)
    return rows


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Static) or is_per_replica(value)


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, Static):
        return repr(leaf.value)
    if is_per_replica(leaf):
        return f"PerReplica {jax_compat.aval_of(leaf.stacked)}"
    return str(jax_compat.aval_of(leaf))
