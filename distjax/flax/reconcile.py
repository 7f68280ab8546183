"""Combines the replicas' writes to each variable into one value, by the variable's rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from distjax.collectives.mapping import map_replicas
from distjax.collectives.reductions import CommunicationOptions, sum_over_replicas
from distjax.context.contracts import StrategyLike
from distjax.context.reporting import STATE, Finding, report
from distjax.errors import LocalityError, LocalityWarning, message
from distjax.flax import metric_rules, rules
from distjax.flax.layouts import as_stored_output
from distjax.flax.plans import BARE, Entry, Plan
from distjax.flax.traced_objects import Outcome
from distjax.lint.between_runs import is_own
from distjax.lint.findings import ALONE, STATE_WHY
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.replica.global_value import from_user_value, stack_replicas
from distjax.typing import PyTree
from distjax.user_lines import calling_line
from distjax.variables.layouts.layout import Layout


def combine_writes(
    plan: Plan, outcome: Outcome, finals: Mapping[int, Any], strategy: StrategyLike
) -> dict[int, Any]:
    """Returns the values at the end of a step in stored form, by number.

    Args:
      plan: the static part of the objects at the start.
      outcome: their static part at the end.
      finals: number -> global value, a PerReplica where replicas may differ.
      strategy: the strategy that ran the step.

    Cost: one all-reduce per dtype for all means and sums together; an all-gather for metrics
      whose parts a function combines.

    Raises:
      LocalityError: replicas wrote different values where the rule requires equal ones.
    """
    topology = strategy.extended.topology
    places: list[tuple[Any, Entry]] = [
        (layout, v.entry) for v in outcome.variables for layout in v.entry.layouts
    ]
    combined: dict[int, Any] = {}
    sums: dict[int, Any] = {}
    for number, value in finals.items():
        layout, entry = places[number]
        if number in outcome.shards:
            combined[number] = _join_shards(value, layout, topology)
        elif _is_summed(plan, entry, value, topology):
            sums[number] = value
        elif (
            entry.rule == rules.METRIC and topology.num_replicas > 1 and _combine_rule(plan, entry)
        ):
            continue
        elif entry.rule == rules.FOLD and isinstance(value, PerReplica):
            _require_origin(outcome, entry)
        else:
            combined[number] = _by_rule(plan, outcome, entry, value, topology)
    if topology.num_replicas == 1:
        own = [places[i][1] for i, value in combined.items() if is_own(value)]
        _warn_of_divergence(own, outcome)
    combined.update(_reduce_sums(sums, places, topology))
    combined.update(_combine_metrics(plan, places, finals, topology))
    return {i: as_stored_output(value, places[i][0]) for i, value in combined.items()}


def _join_shards(value: PyTree, layout: Layout, topology: Topology) -> Any:
    return layout.local_form.from_replicas(stack_replicas(from_user_value(value), topology))


def _combine_rule(plan: Plan, entry: Entry) -> Any:
    return None if entry.metric is None else plan.metrics[entry.metric[0]][1]


def _is_summed(plan: Plan, entry: Entry, value: object, topology: Topology) -> bool:
    if topology.num_replicas == 1:
        return False
    if entry.rule == rules.MEAN and isinstance(value, PerReplica):
        return bool(jnp.issubdtype(value.dtype, jnp.inexact))
    return entry.rule == rules.METRIC and _combine_rule(plan, entry) == metric_rules.SUM


def _by_rule(plan: Plan, outcome: Outcome, entry: Entry, value: PyTree, topology: Topology) -> Any:
    if entry.rule == rules.PER_REPLICA and topology.num_replicas > 1:
        return PerReplica(stack_replicas(from_user_value(value), topology), topology)
    if not isinstance(value, PerReplica):
        return value
    if entry.rule == rules.METRIC:
        metric = None if entry.metric is None else plan.metrics[entry.metric[0]][0].__name__
        metric_rules.refuse(entry.path, metric)
    _refuse(entry, _is_new(outcome, entry))


def _reduce_sums(
    sums: Mapping[int, Any], places: Sequence[tuple[Any, Entry]], topology: Topology
) -> dict[int, Any]:
    """Returns the sums (of metrics) and means (of statistics), with one collective per dtype."""
    if not sums:
        return {}
    values = [stack_replicas(from_user_value(v), topology) for v in sums.values()]
    options = CommunicationOptions(bytes_per_pack=sum(x.nbytes for x in values) or 1)
    reduce = lambda *local: sum_over_replicas(local, topology, options)
    totals = map_replicas(topology, reduce, values, [True] * len(values), False)
    return {
        i: total / topology.num_replicas if places[i][1].rule == rules.MEAN else total
        for i, total in zip(sums, totals, strict=True)
    }


def _combine_metrics(
    plan: Plan,
    places: Sequence[tuple[Any, Entry]],
    finals: Mapping[int, Any],
    topology: Topology,
) -> dict[int, Any]:
    """Returns the state of the metrics whose parts are combined by a function."""
    if topology.num_replicas == 1:
        return {}
    groups: dict[int, dict[str, int]] = {}
    for number in finals:
        entry = places[number][1]
        if entry.metric is not None and callable(_combine_rule(plan, entry)):
            groups.setdefault(entry.metric[0], {})[entry.metric[1]] = number
    combined: dict[int, Any] = {}
    for metric, numbers in groups.items():
        parts = {
            name: stack_replicas(from_user_value(finals[i]), topology)
            for name, i in numbers.items()
        }
        kind, combine = plan.metrics[metric]
        whole = metric_rules.require_whole(kind, combine(_gather_parts(parts, topology)), numbers)
        combined.update(
            (i, jnp.asarray(whole[name], finals[i].dtype)) for name, i in numbers.items()
        )
    return combined


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


def _gather_parts(parts: Mapping[str, jax.Array], topology: Topology) -> dict[str, jax.Array]:
    """Returns the parts [R, ...], all-gathered to every replica."""
    gather = lambda *local: [lax.all_gather(x, topology.axis_name) for x in local]
    arrays = list(parts.values())
    gathered = map_replicas(topology, gather, arrays, [True] * len(arrays), False)
    return dict(zip(parts, gathered, strict=True))


def _require_origin(outcome: Outcome, entry: Entry) -> None:
    """Raises for a key that the step created: there is no earlier key to keep."""
    if not _is_new(outcome, entry):
        return
    raise LocalityError(
        message(
            f"{entry.path} needs a key that is equal on every replica",
            got="a random stream made in the step, with a different seed on each replica",
            why="a stream has one key between steps; in a step each replica draws from that "
            "key folded with its number",
            fix="model.rngs = nnx.Rngs(seed) with one seed for all replicas",
        )
    )


def _is_new(outcome: Outcome, entry: Entry) -> bool:
    """Returns whether the step created the variable."""
    return any(v.origin is None for v in outcome.variables if v.entry is entry)


def _refuse(entry: Entry, is_new: bool) -> NoReturn:
    if entry.kind == BARE:
        raise LocalityError(
            message(
                f"{entry.path} needs to be a variable, whose type has a rule",
                got="an array as an attribute, that each replica set differently",
                why="their mean, or a value for each replica may be meant",
                fix="nnx.BatchStat(array) for the mean, nnx.Intermediate(array) for one each",
            )
        )
    if entry.rule == rules.NONE:
        raise LocalityError(
            message(
                f"{entry.path} needs a rule that makes one value of what the replicas wrote",
                got=f"values that differ per replica, and no rule for {entry.kind}",
                why="their mean, or a value for each replica may be meant",
                fix=f'dj.flax.set_rule({entry.kind}, "mean"), or "per_replica"',
            )
        )
    if entry.rule == rules.MEAN:
        raise LocalityError(
            message(
                f"{entry.path} needs floating-point numbers, of which there is a mean",
                got=f"a {entry.kind} of integers or bools that each replica wrote differently",
                why="its rule is the mean of what the replicas wrote, and integers have none",
                fix="write what is equal on every replica: dj.get_replica_context().all_reduce("
                f"'sum', count); or give it a float dtype, or dj.flax.set_rule({entry.kind}, "
                '"per_replica")',
            )
        )
    if entry.kind == nnx.RngCount.__name__:
        raise LocalityError(
            message(
                f"{entry.path} needs to count equally many draws on every replica",
                got="a random stream that some replicas drew from more often than others",
                why="a stream has one count between steps; this one is drawn from in a branch or "
                "a loop whose predicate differs per replica",
                fix="key = rngs.dropout() before the branch, and in it dropout(x, rngs=key)",
            )
        )
    _refuse_unequal(entry, is_new)


def _refuse_unequal(entry: Entry, is_new: bool) -> NoReturn:
    """Raises for a variable whose rule is that all replicas write the same value."""
    expected = f"{entry.path} needs a value that is equal on every replica"
    if is_new:
        raise LocalityError(
            message(
                expected,
                got=f"a new {entry.kind}, which each replica gave another value",
                why="each replica draws its own random numbers, and sees its own part of the batch",
                fix="make it before the step; or draw it from a stream named params, "
                "nnx.Rngs(params=0), which is the same on all replicas",
            )
        )
    raise LocalityError(
        message(
            expected,
            got=f"a {entry.kind} that each replica wrote differently",
            why="a missing all_reduce makes every replica train a model of its own",
            fix=_REDUCED_FIX,
        )
    )


_REDUCED_FIX = (
    "grads = dj.get_replica_context().all_reduce('mean', grads) before optimizer.update(model, "
    "grads); likewise a loss that it takes as value=loss"
)
