"""What is known of values between two calls of functions.

A value is recognized by its identity: as the result of a call, or, of one replica, as its own. If
an argument was one value in the first call, and in the next is the function's own earlier result
with a value per replica, it is state that has diverged, whatever its tree is made of.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src.context import (
    STATE,
    Finding,
    num_reported,
    report,
    without_expectations,
)
from distjax._src.lint.facts import DIFFERS, EQUAL, Fact
from distjax._src.lint.findings import ALONE, expected_state_fix, state_why
from distjax._src.placement import PerReplica
from distjax._src.replica.arguments import PartitionedTree, is_array, user_path
from distjax._src.typing import PyTree
from distjax._src.user_lines import calling_line
from distjax._src.variables.conversion import is_number
from distjax.errors import LocalityWarning, message

#: What is known of live arrays of a single replica, by identity.
_known: dict[int, tuple[weakref.ref[Any], Fact]] = {}


def remember(values: Sequence[PyTree], facts: Sequence[Fact | None]) -> None:
    """Remembers what is known of arrays for as long as these live."""
    if len(values) == len(facts):  # else there are objects or variables among the values
        for value, fact in zip(values, facts, strict=True):
            if fact is not None and isinstance(value, jax.Array):
                _store(value, fact)


def remember_own(tree: PyTree) -> None:
    """Remembers that bare arrays are a single replica's own: a PerReplica if there were more.

    So a step on one replica is judged as on several. What else it takes counts as equal.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            _store(leaf, DIFFERS)


def remember_equal(values: Sequence[Any]) -> None:
    """Remembers that arrays of which nothing is known would be equal on several replicas."""
    for value in values:
        if isinstance(value, jax.Array) and recall(value) is None:
            _store(value, EQUAL)


def is_own(value: PyTree) -> bool:
    """Returns whether a value is a replica's own: a PerReplica, or a single replica's array."""
    if isinstance(value, PerReplica):
        return True
    fact = recall(value)
    return fact is not None and fact.differs


def _store(array: PyTree, fact: Fact) -> None:
    key = id(array)
    _known[key] = weakref.ref(array, lambda _: _known.pop(key, None)), fact


def recall(value: PyTree) -> Fact | None:
    """Returns the fact of an array or PerReplica, or None."""
    array = getattr(value, "stacked", value)
    reference, fact = _known.get(id(array), (lambda: None, None))
    return fact if reference() is array else None


# -- state that a loop feeds back ----------------------------------------------


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
        meant: dict[int, tuple[Any, str]] = {}
        args, kwargs = without_expectations(tuple(args), kwargs, meant)
        equal = [(path, leaf) for path, leaf in _leaves((args, kwargs)) if not is_own(leaf)]
        self._equal = {path: np.shape(leaf) for path, leaf in equal}
        self._meant = {path: meant[id(leaf)][1] for path, leaf in equal if id(leaf) in meant}
        self._returned: dict[int, tuple[str, Any]] = {}
        self._num_reported = num_reported()

    def remember(self, result: PyTree, facts: Sequence[Fact | None] = ()) -> None:
        """Remembers which results of the first call differ, without keeping them alive.

        Args:
          result: the result.
          facts: facts about its arrays, for reductions outside the function.
        """
        if any(facts):
            remember(PartitionedTree(result, is_array).leaves, facts)
        if num_reported() > self._num_reported:  # already reported while tracing
            return
        self._returned = {
            id(_array_of(leaf)): (path, weakref.ref(_array_of(leaf)))
            for path, leaf in _leaves(result)
            if is_own(leaf)
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
            _, reason = meant.get(id(_array_of(leaf)), (None, self._meant.get(path)))
            found.setdefault(reason, []).append((name, came_back))
            why = "" if isinstance(leaf, PerReplica) else why
        for reason, pairs in found.items():
            text = self._text(pairs, others, why)
            report(Finding("warning", STATE, text, calling_line(), reason), LocalityWarning)

    def _result_path(self, path: str, leaf: PyTree) -> str | None:
        """Returns which first-call result an argument is, if it was equal in that call."""
        if not is_own(leaf) or self._equal.get(path) != leaf.shape:
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
