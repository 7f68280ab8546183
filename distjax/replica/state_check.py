"""Detects state that goes in equal and comes out different: a missing reduction.

Trees are compared by structure and leaves and never unflattened, because a user's node class may
reject leaves that are not arrays.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from distjax.context.finding import Finding
from distjax.context.reporting import (
    ALONE,
    STATE,
    STATE_FIX,
    STATE_WHY,
    expected_state_fix,
    report,
    state_why,
)
from distjax.errors import LocalityError, LocalityWarning, message
from distjax.replica.examine import Given, updated_argument
from distjax.replica.facts import Fact
from distjax.replica.global_value import GlobalValue
from distjax.replica.partitioned_tree import PartitionedTree
from distjax.replica.user_names import function_name, user_path
from distjax.user_lines import calling_line


class _Leaf(NamedTuple):
    """A data leaf with its path, and what is known about it."""

    path: str
    value: GlobalValue
    fact: Fact


class _Tree(NamedTuple):
    """A flattened tree.

    Attributes:
      treedef: its structure.
      leaves: a _Leaf per data leaf, and the Python object for any other.
    """

    treedef: Any
    leaves: Sequence[Any]

    def children(self) -> list[_Tree]:
        leaves = iter(self.leaves)
        return [
            _Tree(child, list(itertools.islice(leaves, child.num_leaves)))
            for child in self.treedef.children()
        ]

    def kind(self) -> type:
        """Returns the class of the outermost node."""
        node = self.treedef.node_data()
        return object if node is None else node[0]

    def others(self, leaves: Sequence[_Leaf]) -> list[_Leaf]:
        """Returns its data leaves that are not among these."""
        paths = {leaf.path for leaf in leaves}
        return [x for x in self.leaves if isinstance(x, _Leaf) and x.path not in paths]


def check_state(
    fn: Callable[..., Any],
    given: Given,
    result: PartitionedTree,
    results: Sequence[GlobalValue],
    facts: tuple[Sequence[Fact], Sequence[Fact]],
    expectations: Mapping[int, tuple[Any, str]],
    *,
    is_alone: bool = False,
) -> bool:
    """Warns if state went in M and came out T; raises for Flax TrainState params.

    Args:
      fn: the replica function.
      given: its arguments.
      result: its result.
      results: the values of the result's leaves.
      facts: what is known about the arguments, and about the results.
      expectations: the leaves that `dj.expect` allows to differ, by `id`, with the reason.
      is_alone: whether R = 1, where nothing has diverged yet: nothing is raised.

    Returns:
      Whether there is such state, expected or not.
    """
    args, kwargs = _tree_of(given.partitioned, given.values, facts[0]).children()
    trees = _subtrees(_tree_of(result, results, facts[1]))
    candidates = [tree for tree in trees if not _is_gradient(tree)]
    is_found = False
    for arg in (*args.children(), *kwargs.children()):
        if arg.treedef.node_data() is None:  # a single value is not state
            continue
        changed = _changed_state(arg, [c for c in candidates if c.treedef == arg.treedef])
        if not changed:
            continue
        is_found = True
        reasons = [expectations.get(id(leaf.value.array), (None, None))[1] for leaf in changed]
        paths = [user_path(leaf.path, given.names) for leaf in changed]
        others = [user_path(leaf.path, given.names) for leaf in arg.others(changed)]
        for reason in dict.fromkeys(reasons):
            own = [p for p, r in zip(paths, reasons, strict=True) if r == reason]
            _report(fn, arg, own, others, reason, is_alone)
    return is_found


def _tree_of(
    partitioned: PartitionedTree, values: Sequence[GlobalValue], facts: Sequence[Fact]
) -> _Tree:
    leaves = list(map(_Leaf, partitioned.paths, values, facts))
    return _Tree(partitioned.treedef, partitioned.combine_leaves(leaves))


def _subtrees(tree: _Tree) -> list[_Tree]:
    """Returns the tree and its subtrees; iterative, as trees may exceed the stack."""
    found, ahead = [], [tree]
    while ahead:
        found.append(ahead.pop())
        if issubclass(found[-1].kind(), (tuple, list, dict)):
            ahead.extend(reversed(found[-1].children()))
    return found


def _is_gradient(tree: _Tree) -> bool:
    """Returns whether what differs in a tree is gradients, which are not state."""
    differing = [x.fact for x in tree.leaves if isinstance(x, _Leaf) and x.value.varying]
    return bool(differing) and all(f.find("grad") and not f.find("base") for f in differing)


def _changed_state(arg: _Tree, candidates: Sequence[_Tree]) -> list[_Leaf]:
    """Returns the leaves that come out different in what has an argument's structure.

    That is its update, where one is known; state of which any update is equal is well.
    """
    updates = [_changed_leaves(arg, c) for c in candidates if _is_update(arg, c)]
    if updates:
        return updates[0] if all(updates) else []
    return next(filter(None, (_changed_leaves(arg, c) for c in candidates)), [])


def _is_update(arg: _Tree, out: _Tree) -> bool:
    pairs = _pairs(arg, out)
    bases = [updated_argument(before.fact) for before, _ in pairs]
    return None not in bases and bases == [updated_argument(after.fact) for _, after in pairs]


def _pairs(arg: _Tree, out: _Tree) -> list[tuple[_Leaf, _Leaf]]:
    pairs = zip(arg.leaves, out.leaves, strict=True)
    return [(a, b) for a, b in pairs if isinstance(a, _Leaf) and isinstance(b, _Leaf)]


def _changed_leaves(arg: _Tree, out: _Tree) -> list[_Leaf]:
    return [
        before
        for before, after in _pairs(arg, out)
        if not before.value.varying
        and after.value.varying
        and before.value.array.shape == after.value.array.shape[1:]
    ]


def _report(
    fn: Callable[..., Any],
    arg: _Tree,
    paths: list[str],
    others: list[str],
    reason: str | None,
    is_alone: bool,
) -> None:
    train_state = sys.modules.get("flax.training.train_state")
    is_train_state = train_state is not None and issubclass(arg.kind(), train_state.TrainState)
    strict = [p for p in paths if is_train_state and (".params" in p or ".opt_state" in p)]
    text = message(
        f"{function_name(fn)} takes state that is equal on every replica and needs to return it "
        "equal",
        got=f"values that differ per replica at {', '.join((strict or paths)[:8])}"
        + (f" and {len(strict or paths) - 8} more" if len(strict or paths) > 8 else ""),
        why=(ALONE if is_alone else "") + (STATE_WHY if strict else state_why(paths)),
        fix=STATE_FIX if strict else expected_state_fix(paths, others),
    )
    is_error = strict and not is_alone
    level, kind = ("error", LocalityError) if is_error else ("warning", LocalityWarning)
    source = calling_line()
    report(Finding(level, STATE, text, source, reason), kind)
