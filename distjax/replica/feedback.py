"""State that a loop feeds back: equal in the first call, differing in the second.

If an argument was one value in the first call, and in the next is the function's own earlier
result with a value per replica, it is state that has diverged, whatever its tree is made of.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from distjax.context.expectation import without_expectations
from distjax.context.finding import Finding
from distjax.context.reporting import (
    ALONE,
    STATE,
    expected_state_fix,
    num_reported,
    report,
    state_why,
)
from distjax.errors import LocalityWarning, message
from distjax.placement.per_replica import PerReplica
from distjax.replica import cross_facts
from distjax.replica.facts import Fact
from distjax.replica.partitioned_tree import PartitionedTree, is_array
from distjax.replica.user_names import user_path
from distjax.typing import PyTree
from distjax.user_lines import calling_line
from distjax.variables.conversion import is_number


class Feedback:
    """What the first call of a function received and returned.

    Args:
      name: the user's name for the function.
      names: the user's names for its positional arguments.
      args: positional arguments of the first call.
      kwargs: its keyword arguments.
    """

    def __init__(self, name: str, names: Sequence[str], args: PyTree, kwargs: PyTree):
        self._name, self._names = name, names
        args, kwargs = without_expectations(tuple(args), kwargs)
        self._equal = {
            path: np.shape(leaf)
            for path, leaf in _leaves((args, kwargs))
            if not cross_facts.is_own(leaf)
        }
        self._returned: dict[int, tuple[str, Any]] = {}
        self._num_reported = num_reported()

    def remember(self, result: PyTree, facts: Sequence[Fact | None] = ()) -> None:
        """Remembers which results of the first call differ, without keeping them alive.

        Args:
          result: the result.
          facts: facts about its arrays, for reductions outside the function.
        """
        if any(facts):
            cross_facts.remember(PartitionedTree(result, is_array).leaves, facts)
        if num_reported() > self._num_reported:  # already reported while tracing
            return
        self._returned = {
            id(_array_of(leaf)): (path, weakref.ref(_array_of(leaf)))
            for path, leaf in _leaves(result)
            if cross_facts.is_own(leaf)
        }

    def compare(self, args: PyTree, kwargs: PyTree) -> None:
        """Warns if an argument that was equal is now a differing first-call result."""
        if not self._returned:
            return
        meant: dict[int, tuple[Any, str]] = {}
        args, kwargs = without_expectations(tuple(args), kwargs, meant)
        found: dict[str | None, list[tuple[str, str]]] = {}
        others, why = list[str](), ALONE
        for path, leaf in _leaves((args, kwargs)):
            came_back, name = self._result_path(path, leaf), user_path(path, self._names)
            if came_back is None:
                others.append(name)
                continue
            _, reason = meant.get(id(_array_of(leaf)), (None, None))
            found.setdefault(reason, []).append((name, came_back))
            why = "" if isinstance(leaf, PerReplica) else why
        for reason, pairs in found.items():
            text = self._text(pairs, others, why)
            report(Finding("warning", STATE, text, calling_line(), reason), LocalityWarning)

    def _result_path(self, path: str, leaf: PyTree) -> str | None:
        """Returns which first-call result an argument is, if it was equal in that call."""
        if not cross_facts.is_own(leaf) or self._equal.get(path) != leaf.shape:
            return None
        array = _array_of(leaf)
        result, reference = self._returned.get(id(array), ("", lambda: None))
        is_same = reference() is array and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return (f"its result{result}" if result else "its result") if is_same else None

    def _text(self, pairs: Sequence[tuple[str, str]], others: Sequence[str], why: str) -> str:
        shown = ", ".join(f"{argument} (which is {result})" for argument, result in pairs[:8])
        more = f" and {len(pairs) - 8} more" if len(pairs) > 8 else ""
        differing = [argument for argument, _ in pairs]
        return message(
            f"{self._name} takes state that is equal on every replica and needs to return it equal",
            got=f"in its second call values that differ per replica at {shown}{more}",
            why=why + state_why(differing),
            fix=expected_state_fix(differing, others),
        )


def _array_of(value: PyTree) -> Any:
    """Returns the array of a PerReplica; any other array as it is."""
    return value.stacked if isinstance(value, PerReplica) else value


def _leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    partitioned = PartitionedTree(tree, lambda leaf: is_array(leaf) or is_number(leaf))
    yield from zip(partitioned.paths, partitioned.leaves, strict=True)
