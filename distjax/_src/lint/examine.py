"""Examining a traced replica function: facts in, findings out.

Trees of state are compared by structure and leaves and never unflattened, because a user's node
class may reject leaves that are not arrays.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from distjax._src import jax_compat
from distjax._src.context import STATE, Finding, current_reason, report
from distjax._src.jax_compat import Jaxpr, JaxprEqn, Literal
from distjax._src.lint import findings
from distjax._src.lint.between_runs import recall
from distjax._src.lint.facts import DIFFERS, EQUAL, Fact, FactWalk
from distjax._src.lint.findings import (
    ALONE,
    FIRST_VALUE,
    PADDED,
    STATE_FIX,
    STATE_WHY,
    expected_state_fix,
    state_why,
)
from distjax._src.lint.rules import RULES
from distjax._src.placement import Topology
from distjax._src.replica.arguments import (
    PartitionedTree,
    function_name,
    is_object_state,
    nodes_of,
    user_path,
)
from distjax._src.replica.global_value import GlobalValue
from distjax._src.replica.merge import WeakMerge
from distjax._src.replica.trace import Given
from distjax._src.traces import struct
from distjax._src.typing import PyTree
from distjax._src.user_lines import calling_line
from distjax._src.variables.variable import Variable
from distjax.errors import LocalityError, LocalityWarning, message


def examine(
    jaxpr: Jaxpr,
    written: Sequence[Variable],
    given: Given,
    topology: Topology,
    *,
    own: int,
    results: int,
) -> dict[Any, Fact]:
    """Reports probable mistakes in a replica function.

    Args:
      jaxpr: its code.
      written: the variables that it writes.
      given: its arguments.
      topology: its replicas.
      own: how many of its outputs are the user's results; they come first.
      results: how many are these or state of objects; the values of `written` follow.

    Returns:
      A fact for each value in the jaxpr.
    """
    ins = [_of_argument(i, argument) for i, argument in enumerate(given.values)]
    args = as_if_several(given.values, ins)
    leading = frozenset(a.array.shape[1] for a in args if a.varying and a.array.ndim > 1)
    sizes = frozenset(
        x.array.shape[1]
        for x, fact in zip(args, ins, strict=True)
        if fact.find("batch") and x.array.ndim > 1 and x.array.shape[1] > 1
    )
    walk = FactWalk(RULES, topology.axis_name, topology.num_replicas, leading, sizes)
    walk.written = {v.serial_number: v for v in written}
    walk.on_merge = lambda eqn, ins: _examine_merge(walk, eqn, ins)
    env = walk.values(jaxpr, ins)
    outs = [walk.read(env, v) for v in jaxpr.outvars]
    of_user, of_objects, finals = outs[:own], outs[own:results], outs[results:]
    for variable, final in zip(written, finals, strict=False):
        if variable.policy.stacked and variable.trainable and final.find("grad"):
            findings.find_local_training(walk, variable, final.find("grad"))
        elif variable.policy.stacked and variable.aggregation.name in ("SUM", "MEAN"):
            findings.find_unreducible(walk, None, final)
    for fact in of_user:
        findings.find_returned(walk, fact)
    # Flax metrics are arguments, and are combined after the step.
    updates_state = any(x.differs and x.find("base") for x in of_user)
    if any(x.differs for x in of_objects) or updates_state or walk.combines or written:
        _find_unread_masks(walk, jaxpr, given.partitioned, given.names)
    # Only what comes in counts: Flax objects add values of each replica's own to any step.
    if not any(env[v].differs for v in jaxpr.invars):
        if _is_given_a_batch(jaxpr.outvars[:results], of_user, given):
            findings.find_equal_batch(walk)
    walk.report()
    return env


def _of_argument(index: int, value: GlobalValue) -> Fact:
    known = recall(value.array) or EQUAL
    if value.varying or known.differs:
        return DIFFERS.having(batch=known.find("batch"))
    return EQUAL.having(base=f"argument {index}")


def as_if_several(values: Sequence[GlobalValue], facts: Sequence[Fact]) -> list[GlobalValue]:
    """Returns values as if there were several replicas: a single replica's own are [R, ...]."""
    return [
        GlobalValue(struct((1, *x.array.shape), x.array.dtype), True)
        if fact.differs and not x.varying
        else x
        for x, fact in zip(values, facts, strict=True)
    ]


def _examine_merge(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact]:
    """Tracks values through a merge; in distjax's own merges, checks what is reduced."""
    walk.combines = True
    merge, outs = eqn.params["merge"], [EQUAL] * len(eqn.outvars)
    if not isinstance(merge, WeakMerge) or walk.is_transposed(eqn):
        return outs
    if merge.reduces is None:
        inner = merge.jaxpr
        found = [] if inner is None else walk.call(eqn, inner, ins[: len(inner.invars)])
        found = found[: merge.num_results]
        return [*found, *outs[len(found) :]]
    op, first, last = merge.reduces
    for x in ins[first:last]:
        findings.find_unfit_gradients(walk, op, eqn, x)
    return outs


def _is_given_a_batch(results: Sequence[Any], facts: Sequence[Fact], given: Given) -> bool:
    """Returns whether an argument is a batch: it is not state, which comes back, nor a key."""
    updated = {updated_argument(fact) for fact in facts}
    returned = {(v.aval.shape, v.aval.dtype) for v in results}

    def is_batch(i: int, path: str, array: PyTree) -> bool:
        if not hasattr(array, "shape"):  # a number
            return False
        is_state = i in updated or (array.shape, array.dtype) in returned or is_object_state(path)
        is_key = jax_compat.is_key_dtype(array.dtype) or array.dtype == jnp.uint32
        return array.ndim > 0 and array.size > 1 and not (is_state or is_key)

    leaves = enumerate(zip(given.partitioned.paths, given.values, strict=True))
    return any(is_batch(i, path, x.array) for i, (path, x) in leaves)


# -- padded examples ----------------------------------------------------------


def _find_unread_masks(
    walk: FactWalk, jaxpr: Jaxpr, partitioned: PartitionedTree, names: Sequence[str]
) -> None:
    """Reports batches whose examples are used without the mask that marks padding."""
    if not any(path.endswith(".mask") for path in partitioned.paths):
        return
    kinds = (kind for kind, _ in nodes_of(partitioned.treedef))
    if not any(getattr(kind, "masks_examples", False) for kind in kinds):
        return
    atoms = itertools.chain(jaxpr.outvars, *(eqn.invars for eqn in jaxpr.eqns))
    read = {v for v in atoms if not isinstance(v, Literal)}
    used = dict(zip(partitioned.paths, (v in read for v in jaxpr.invars), strict=True))
    for path, is_read in used.items():
        batch = path.removesuffix(".mask")
        is_data_read = any(r for p, r in used.items() if p.startswith(f"{batch}.data"))
        if is_read or batch == path or not is_data_read:
            continue
        name, source = user_path(path, names), calling_line()
        text = message(
            f"{name} needs to be read wherever its examples are used",
            got=f"a step that reads {user_path(batch, names)}.data, but never {name}, at {source}",
            why="a padded batch holds copies of real examples, which would count",
            fix=f"dj.losses.average_loss(losses, {name}); metric.update(losses, mask={name})",
        )
        walk.found[PADDED, name] = Finding("warning", PADDED, text, source, current_reason())


# -- state --------------------------------------------------------------------


def find_unequal_start(variable: Variable) -> None:
    """Warns that a variable made in a replica function has an initial value that differs."""
    if not (variable.trainable and jnp.issubdtype(variable.dtype, jnp.inexact)):
        return
    text = message(
        f"variable {variable.name!r} needs an initial value that is equal on every replica",
        got="one that differs: replica 0's is used for all",
        why="a variable has one initial value, and what other replicas drew is lost",
        fix="dj.Variable(jax.random.normal(key, shape)) with a key that is equal on all replicas, "
        "or outside of the replica function",
    )
    report(Finding("warning", FIRST_VALUE, text, calling_line()))


def updated_argument(fact: Fact) -> int | None:
    """Returns the number of the argument that a value is, or updates; None: neither."""
    base = fact.find("base") or ""
    return int(base.removeprefix("argument ")) if base.startswith("argument ") else None


def report_lone_updates(
    facts: Sequence[Fact],
    paths: Sequence[str],
    results: Sequence[GlobalValue],
    given: Given,
    expectations: Mapping[int, tuple[Any, str]],
) -> None:
    """Reports, as notes, results that update an equal argument but differ.

    Whether they are fed back is known only at the second call; see `feedback`. State of objects
    is left out: it is updated in place, not through results.
    """
    name, partitioned, names, args = given
    for fact, path, out in zip(facts, paths, results, strict=True):
        index = updated_argument(fact)
        if not out.varying or index is None or is_object_state(partitioned.paths[index]):
            continue
        before = args[index].array
        same = before.shape == out.array.shape[1:] and before.dtype == out.array.dtype
        if not same or not jnp.issubdtype(before.dtype, jnp.inexact):
            continue
        argument, source = user_path(partitioned.paths[index], names), calling_line()
        text = message(
            f"{name} takes state that is equal on every replica and needs to return it equal",
            got=f"as {'its result' + path} an update of {argument} that differs per replica",
            why=STATE_WHY,
            fix=STATE_FIX,
        )
        _, reason = expectations.get(id(before), (None, None))
        report(Finding("note", STATE, text, source, reason))


# -- trees of state --------------------------------------------------------------


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
    is_found, is_reduced = False, any(f.reduced and f.find("grad") for f in facts[1])
    for arg in (*args.children(), *kwargs.children()):
        if arg.treedef.node_data() is None:  # a single value is not state
            continue
        changed = _changed_state(arg, [c for c in candidates if c.treedef == arg.treedef])
        if not changed:
            continue
        is_found = True
        before = [leaf for leaf, _ in changed]
        reasons = [expectations.get(id(leaf.value.array), (None, None))[1] for leaf in before]
        paths = [user_path(leaf.path, given.names) for leaf in before]
        others = [user_path(leaf.path, given.names) for leaf in arg.others(before)]
        for reason in dict.fromkeys(reasons):
            own = [i for i, r in enumerate(reasons) if r == reason]
            of_gradients = not is_reduced or any(changed[i][1].fact.find("grad") for i in own)
            _report(fn, arg, [paths[i] for i in own], others, reason, of_gradients, is_alone)
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


def _changed_state(arg: _Tree, candidates: Sequence[_Tree]) -> list[tuple[_Leaf, _Leaf]]:
    """Returns the leaves that come out different in what has an argument's structure, and as what.

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


def _changed_leaves(arg: _Tree, out: _Tree) -> list[tuple[_Leaf, _Leaf]]:
    return [
        (before, after)
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
    of_gradients: bool,
    is_alone: bool,
) -> None:
    train_state = sys.modules.get("flax.training.train_state")
    is_train_state = train_state is not None and issubclass(arg.kind(), train_state.TrainState)
    strict = [p for p in paths if is_train_state and (".params" in p or ".opt_state" in p)]
    named = strict or paths
    others = [*others, *(p for p in paths if p not in named)]
    text = message(
        f"{function_name(fn)} takes state that is equal on every replica and needs to return it "
        "equal",
        got=f"values that differ per replica at {', '.join(named[:8])}"
        + (f" and {len(named) - 8} more" if len(named) > 8 else ""),
        why=(ALONE if is_alone else "") + state_why(named, of_gradients),
        fix=expected_state_fix(named, others, of_gradients),
    )
    is_error = strict and not is_alone
    level, kind = ("error", LocalityError) if is_error else ("warning", LocalityWarning)
    source = calling_line()
    report(Finding(level, STATE, text, source, reason), kind)
