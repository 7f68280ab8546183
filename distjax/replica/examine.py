"""Examining a traced replica function: facts in, findings out."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.context.expectation import current_reason
from distjax.context.finding import Finding
from distjax.context.reporting import EQUAL_BATCH, STATE, STATE_FIX, STATE_WHY, report
from distjax.errors import message
from distjax.jax_compat import Jaxpr, JaxprEqn, Literal
from distjax.placement.topology import Topology
from distjax.replica import reduction_findings as findings
from distjax.replica.cross_facts import recall
from distjax.replica.fact_rules import RULES
from distjax.replica.facts import EQUAL, Fact, FactWalk
from distjax.replica.global_value import GlobalValue
from distjax.replica.merge import WeakMerge
from distjax.replica.partitioned_tree import PartitionedTree, is_object_state
from distjax.replica.user_names import user_path
from distjax.trees import nodes_of
from distjax.typing import PyTree
from distjax.user_lines import calling_line
from distjax.variables.variable import Variable


class Given(NamedTuple):
    """A replica function's arguments.

    Attributes:
      name: the user's name for the function.
      partitioned: its arguments.
      names: the user's names for the positional ones.
      values: the values of their leaves.
    """

    name: str
    partitioned: PartitionedTree
    names: Sequence[str]
    values: Sequence[GlobalValue]

    @property
    def paths(self) -> list[str]:
        """The user's paths to the leaves."""
        return [user_path(path, self.names) for path in self.partitioned.paths]


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
    walk = FactWalk(RULES, topology.axis_name, topology.num_replicas, leading)
    walk.written = {v.serial_number: v for v in written}
    walk.on_merge = lambda eqn, ins: _examine_merge(walk, eqn, ins)
    env = walk.values(jaxpr, ins)
    outs = [walk.read(env, v) for v in jaxpr.outvars]
    of_user, of_objects, finals = outs[:own], outs[own:results], outs[results:]
    findings.find_sums(walk)
    _find_local_training(walk, written, finals)
    # Flax metrics are arguments, and are combined after the step.
    updates_state = any(x.differs and x.find("base") for x in of_user)
    if any(x.differs for x in of_objects) or updates_state or walk.combines or written:
        _find_unread_masks(walk, jaxpr, given.partitioned, given.names)
    if not any(fact.differs for fact in env.values()):
        _warn_of_whole_batches(walk, jaxpr.outvars[:results], of_user, given)
    walk.report()
    return env


def _of_argument(index: int, value: GlobalValue) -> Fact:
    known = recall(value.array) or EQUAL
    known = known._replace(differs=value.varying or known.differs)
    is_plain = not (known.differs or known.tags)
    return known.having(base=f"argument {index}") if is_plain else known


def as_if_several(values: Sequence[GlobalValue], facts: Sequence[Fact]) -> list[GlobalValue]:
    """Returns values as if there were several replicas: a single replica's own are [R, ...]."""
    return [
        GlobalValue(jax.ShapeDtypeStruct((1, *x.array.shape), x.array.dtype), True)
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
        findings.find_unfit_gradients(walk, op, eqn, x.without("scattered"))
    return outs


def _find_local_training(
    walk: FactWalk, written: Sequence[Variable], finals: Sequence[Fact]
) -> None:
    for variable, final in zip(written, finals, strict=False):
        if variable.policy.stacked and variable.trainable and final.find("grad"):
            findings.find(
                walk,
                "warning",
                "each replica trains on its own",
                [final.find("grad")],
                f"trainable variable {variable.name!r} needs gradients of all replicas",
                got="an update by gradients of one replica, with synchronization ON_READ",
                why="each component learns from its replica's examples alone",
                fix="synchronization=dj.VariableSynchronization.ON_WRITE; for training apart that "
                "is averaged later: with dj.expect(reason)",
            )


def _warn_of_whole_batches(
    walk: FactWalk, results: Sequence[Any], facts: Sequence[Fact], given: Given
) -> None:
    """Makes warnings of the notes on equal gradients of a step that is given a batch.

    Nothing in it differs, so each replica computes with the whole batch. An argument is a batch if
    it is not state, which comes back, nor a key.
    """
    updated = {updated_argument(fact) for fact in facts}
    returned = {(v.aval.shape, v.aval.dtype) for v in results}

    def is_batch(i: int, path: str, array: PyTree) -> bool:
        if not hasattr(array, "shape"):  # a number
            return False
        is_state = i in updated or (array.shape, array.dtype) in returned or is_object_state(path)
        is_key = jax_compat.is_key_dtype(array.dtype) or array.dtype == jnp.uint32
        return array.ndim > 0 and array.size > 1 and not (is_state or is_key)

    leaves = enumerate(zip(given.partitioned.paths, given.values, strict=True))
    if walk.num_replicas > 1 and any(is_batch(i, p, x.array) for i, (p, x) in leaves):
        for key, finding in walk.found.items():
            if finding.rule == EQUAL_BATCH:
                walk.found[key] = dataclasses.replace(finding, level="warning")


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
        rule = "padded examples counted"
        walk.found[rule, name] = Finding("warning", rule, text, source, current_reason())


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
    report(Finding("warning", "replica 0's initial value wins", text, calling_line()))


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
