"""What a step wrote to NNX variables: the replicas' writes become one value, by rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from distjax._src.collectives.mapping import map_replicas
from distjax._src.collectives.reductions import CommunicationOptions, sum_over_replicas
from distjax._src.context import STATE, Finding, StrategyLike, report
from distjax._src.flax import rules
from distjax._src.flax.plans import BARE, Entry, Plan, as_stored_output
from distjax._src.flax.rules import SUM, CombineParts, refuse, require_whole
from distjax._src.lint.between_runs import is_own
from distjax._src.lint.findings import ALONE, STATE_WHY
from distjax._src.placement import PerReplica, Topology
from distjax._src.replica.global_value import from_user_value, stack_replicas
from distjax._src.typing import PyTree
from distjax._src.user_lines import calling_line
from distjax._src.variables.layouts import Layout, in_force
from distjax._src.variables.state import COMBINED_WRITES
from distjax.errors import LocalityError, LocalityWarning, message


@dataclasses.dataclass(frozen=True, eq=False)
class VariableOutcome:
    """A variable at the end of a trace.

    Attributes:
      entry: its static part.
      origin: its number in the plan, or that of the variable whose place it has taken in an
        equal graph; None for another variable that the trace created.
      is_replaced: whether it has taken the place of its origin, which keeps its value.
    """

    entry: Entry
    origin: int | None
    is_replaced: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """The static part of objects at the end of a trace.

    Attributes:
      graphdef: their graph if it changed (attributes, new or replaced parts), else None.
      variables: their variables, in graph order.
      shards: the leaves that are returned as the replicas' shards: (variable, number of the leaf).
    """

    graphdef: PyTree
    variables: tuple[VariableOutcome, ...]
    shards: frozenset[tuple[int, int]]


class _Leaf(NamedTuple):
    """One array of a variable that was written.

    `where` has the number of the variable, and of the array in it; the value is in the global view,
    a PerReplica where replicas may differ. Without a layout it lives anywhere.
    """

    where: tuple[int, int]
    value: Any
    entry: Entry
    layout: Layout | None


def combine_writes(
    plan: Plan, outcome: Outcome, finals: Mapping[int, list[Any]], strategy: StrategyLike | None
) -> dict[int, list[Any]]:
    """Returns the leaves of variables at the end of a step in stored form, by number.

    A key that each replica set differently is left out: it stays as it was. Without a strategy,
    whose replicas wrote, global-view code did.

    Cost: one all-reduce per dtype for all means and sums together; an all-gather for metrics whose
      parts a function combines.
    """
    if strategy is None and plan.live_strategy is None:
        return dict(finals)
    leaves = []
    for i, final in finals.items():
        entry = outcome.variables[i].entry
        own = zip(final, map(in_force, entry.layouts), strict=True)
        leaves += [_Leaf((i, k), value, entry, layout) for k, (value, layout) in enumerate(own)]
    if strategy is None:
        combined = {leaf.where: leaf.value for leaf in leaves}
    else:
        combined = _combine(plan, outcome, leaves, strategy.extended.topology)
    stored = {
        x.where: as_stored_output(combined[x.where], x.layout)
        for x in leaves
        if x.where in combined
    }
    numbers = {i: [(i, k) for k in range(len(final))] for i, final in finals.items()}
    return {
        i: [stored[where] for where in own]
        for i, own in numbers.items()
        if all(where in stored for where in own)
    }


def _combine(
    plan: Plan, outcome: Outcome, leaves: Sequence[_Leaf], topology: Topology
) -> dict[tuple[int, int], Any]:
    combined: dict[tuple[int, int], Any] = {}
    sums: list[_Leaf] = []
    parts: dict[int, list[_Leaf]] = {}  # of metrics that a function combines
    are_several = topology.num_replicas > 1
    for leaf in leaves:
        where, value, entry, layout = leaf
        combine = None if entry.metric is None else plan.metrics[entry.metric[0]][1]
        is_metric = entry.rule == rules.METRIC and are_several
        if where in outcome.shards:
            assert layout is not None, "it is split"
            stacked = stack_replicas(from_user_value(value), topology)
            combined[where] = layout.local_form.from_replicas(stacked)
        elif (is_metric and combine == SUM) or (are_several and _has_mean(entry, value)):
            sums.append(leaf)
        elif is_metric and combine is not None and entry.metric is not None:
            parts.setdefault(entry.metric[0], []).append(leaf)
        elif entry.rule == rules.FOLD and isinstance(value, PerReplica):
            _require_origin(outcome, entry)
        elif entry.rule == rules.PER_REPLICA and are_several:
            stacked = stack_replicas(from_user_value(value), topology)
            combined[where] = PerReplica(stacked, topology)
        elif not isinstance(value, PerReplica):
            combined[where] = value
        else:
            _refuse(entry, plan, _is_new(outcome, entry))
    if not are_several:
        alone = [x.entry for x in leaves if x.where in combined and is_own(combined[x.where])]
        _warn_of_divergence(alone, outcome)
    combined.update(_reduce_sums(sums, topology))
    for metric, own in parts.items():
        combined.update(_combine_metric(*plan.metrics[metric], own, topology))
    return combined


def _has_mean(entry: Entry, value: PyTree) -> bool:
    is_differing = entry.rule == rules.MEAN and isinstance(value, PerReplica)
    return is_differing and bool(jnp.issubdtype(value.dtype, jnp.inexact))


def _reduce_sums(sums: Sequence[_Leaf], topology: Topology) -> dict[tuple[int, int], Any]:
    """Returns the sums (of metrics) and means (of statistics), with one collective per dtype."""
    if not sums:
        return {}
    values = [stack_replicas(from_user_value(x.value), topology) for x in sums]
    options = CommunicationOptions(bytes_per_pack=sum(x.nbytes for x in values) or 1)
    reduce = lambda *local: sum_over_replicas(local, topology, options)
    with jax.named_scope(COMBINED_WRITES):
        totals = map_replicas(topology, reduce, values, [True] * len(values), False)
    return {
        x.where: total / topology.num_replicas if x.entry.rule == rules.MEAN else total
        for x, total in zip(sums, totals, strict=True)
    }


def _combine_metric(
    kind: type, combine: CombineParts, leaves: Sequence[_Leaf], topology: Topology
) -> dict[tuple[int, int], Any]:
    """Returns the state of a metric whose parts a function combines."""
    named = {leaf.entry.metric[1]: leaf for leaf in leaves if leaf.entry.metric is not None}
    parts = [stack_replicas(from_user_value(leaf.value), topology) for leaf in named.values()]
    gather = lambda *local: [lax.all_gather(x, topology.axis_name) for x in local]
    with jax.named_scope(COMBINED_WRITES):
        gathered = map_replicas(topology, gather, parts, [True] * len(parts), False)
    whole = require_whole(kind, combine(dict(zip(named, gathered, strict=True))), named)
    return {x.where: jnp.asarray(whole[name], x.value.dtype) for name, x in named.items()}


def _warn_of_divergence(entries: Sequence[Entry], outcome: Outcome) -> None:
    """Warns of variables that a single replica wrote as several would not: differently."""
    trained = [e for e in entries if e.rule == rules.MIRRORED and not _is_new(outcome, e)]
    if trained:
        text = message(
            f"{trained[0].path} needs a value that would be equal on every replica",
            got=f"a {trained[0].kind} computed from one replica's own examples",
            why=f"{ALONE}{STATE_WHY}",
            fix=_REDUCED_FIX,
        )
        report(Finding("warning", STATE, text, calling_line()), LocalityWarning)


def _require_origin(outcome: Outcome, entry: Entry) -> None:
    """Raises for a key that the step created: there is no earlier key to keep."""
    if not _is_new(outcome, entry):
        return
    raise LocalityError(
        f"{entry.path} needs a key that is equal on every replica",
        got="a random stream made in the step, with a different seed on each replica",
        why="a stream has one key between steps; in a step each replica draws from that "
        "key folded with its number",
        fix="model.rngs = nnx.Rngs(seed) with one seed for all replicas",
    )


def _is_new(outcome: Outcome, entry: Entry) -> bool:
    """Returns whether the step created the variable."""
    return any(v.origin is None for v in outcome.variables if v.entry is entry)


def _refuse(entry: Entry, plan: Plan, is_new: bool) -> NoReturn:
    """Raises for a variable that replicas wrote differently, which its rule does not allow."""
    if entry.rule == rules.METRIC:
        metric = None if entry.metric is None else plan.metrics[entry.metric[0]][0].__name__
        refuse(entry.path, metric)
    raise LocalityError(_refusal_text(entry, is_new))


def _refusal_text(entry: Entry, is_new: bool) -> str:
    kind = entry.kind
    if kind == BARE:
        return message(
            f"{entry.path} needs to be a variable, whose type has a rule",
            got="an array as an attribute, that each replica set differently",
            why="their mean, or a value for each replica may be meant",
            fix="nnx.BatchStat(array) for the mean, nnx.Intermediate(array) for one each",
        )
    if entry.rule == rules.NONE:
        return message(
            f"{entry.path} needs a rule that makes one value of what the replicas wrote",
            got=f"values that differ per replica, and no rule for {kind}",
            why="their mean, or a value for each replica may be meant",
            fix=f'dj.flax.set_rule({kind}, "mean"), or "per_replica"',
        )
    if entry.rule == rules.MEAN:
        return message(
            f"{entry.path} needs floating-point numbers, of which there is a mean",
            got=f"a {kind} of integers or bools that each replica wrote differently",
            why="its rule is the mean of what the replicas wrote, and integers have none",
            fix="write what is equal on every replica: dj.get_replica_context().all_reduce('sum', "
            f'count); or give it a float dtype, or dj.flax.set_rule({kind}, "per_replica")',
        )
    if kind == nnx.RngCount.__name__:
        return message(
            f"{entry.path} needs to count equally many draws on every replica",
            got="a random stream that some replicas drew from more often than others",
            why="a stream has one count between steps; this one is drawn from in a branch or "
            "a loop whose predicate differs per replica",
            fix="key = rngs.dropout() before the branch, and in it dropout(x, rngs=key)",
        )
    expected = f"{entry.path} needs a value that is equal on every replica"
    if is_new:
        return message(
            expected,
            got=f"a new {kind}, which each replica gave another value",
            why="each replica draws its own random numbers, and sees its own part of the batch",
            fix="make it before the step; or draw it from a stream named params, "
            "nnx.Rngs(params=0), which is the same on all replicas",
        )
    return message(
        expected,
        got=f"a {kind} that each replica wrote differently",
        why="a missing all_reduce makes every replica train a model of its own",
        fix=f"{_REDUCED_FIX}; or, where it is meant, in place of dj.expect: "
        f'dj.flax.set_rule({kind}, "per_replica")',
    )


_REDUCED_FIX = (
    "grads = dj.get_replica_context().all_reduce('mean', grads) before optimizer.update(model, "
    "grads); likewise a loss that it takes as value=loss"
)
