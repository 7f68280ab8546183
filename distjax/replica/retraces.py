"""Watching for a function that is compiled again and again."""

from __future__ import annotations

import warnings
from typing import Any

import jax

from distjax import jax_compat
from distjax.errors import RecompilationWarning, explain

#: The number of compilations of one function at which a warning is given.
FIRST_WARNING = 8


class RetraceWatch:
    """Counts the signatures of one function and says what changed.

    Args:
      name: the user's name of the function.
    """

    def __init__(self, name: str):
        self._name = name
        self._count = 1
        self._warn_at = FIRST_WARNING
        self._last: dict[str, str] = {}

    def saw(self, tree: Any) -> None:
        """Records one more compilation; warns at 8, 16, 32, ..."""
        self._count += 1
        before, self._last = self._last, _describe(tree)
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
            stacklevel=4,
        )


def _describe(tree: Any) -> dict[str, str]:
    rows = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        tree[1], is_leaf=lambda x: hasattr(x, "value")
    ):
        name = f"argument {jax.tree_util.keystr(path)}"
        is_array = hasattr(leaf, "shape") or isinstance(leaf, (int, float, complex))
        rows[name] = str(jax_compat.aval_of(leaf)) if is_array else repr(leaf.value)
    return rows
