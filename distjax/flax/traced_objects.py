"""NNX objects while they hold traced values, and their state at the end of the trace.

The objects are the user's own, not copies, so a function sees the traced values however it
refers to them. Their former state is saved before the trace and restored after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from distjax.collectives.mapping import map_replicas
from distjax.collectives.reductions import CommunicationOptions, sum_over_replicas
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.observer import Finding
from distjax.context.reporting import STATE, report
from distjax.errors import LocalityError, LocalityWarning, UnsupportedError, message
from distjax.flax import rules
from distjax.flax.graphs import (
    add_hooks,
    assign_unassigned,
    has_hook,
    is_variable,
    metadata_without,
    path_of,
    put_back_strategies,
    require_no_traced_values,
    strategy_records,
)
from distjax.flax.plans import BARE, Entry, Plan, as_stored_output, make_entry, raw_value, values_of
from distjax.flax.rules import SUM, metrics_in, refuse, require_whole
from distjax.lint.between_runs import is_own
from distjax.lint.findings import ALONE, STATE_WHY
from distjax.placement.per_replica import PerReplica, is_per_replica
from distjax.placement.topology import Topology
from distjax.replica.arguments import is_array
from distjax.replica.contexts import ReplicaContext
from distjax.replica.global_value import from_user_value, stack_replicas
from distjax.typing import ArrayLike, PyTree
from distjax.user_lines import calling_line
from distjax.variables.layouts import Layout

# -- saved state --------------------------------------------------------------
# The state of NNX objects, saved before a trace and restored after it.
#
# Flax lets an object change only in the trace that it was made in. `__setstate__`, which `pickle`
# uses, sets a variable's value, metadata and mark of the trace without that check.


class SavedState:
    """A snapshot of the current state of objects.

    Args:
      nodes: modules; their attributes are saved, and the strategy that they were placed for.
      variables: their variables; their values, metadata and trace marks are saved.
    """

    def __init__(self, nodes: Sequence[Any], variables: Sequence[nnx.Variable[Any]]):
        self._attributes = [(vars(node), dict(vars(node))) for node in nodes]
        self._strategies = strategy_records(nodes)
        # Restoring by assignment would fail Flax's check of the trace.
        self._states = [(v, v.__getstate__()) for v in variables]

    def restore(self) -> None:
        """Restores everything; idempotent, so that it can be retried after a signal."""
        for variable, state in self._states:
            variable.__setstate__(state)
        for attributes, before in self._attributes:
            for name in [*attributes]:
                if name not in before:
                    del attributes[name]
            attributes.update(before)
        put_back_strategies(self._strategies)


def set_in_trace(variable: nnx.Variable[Any], value: PyTree, metadata: dict[str, Any]) -> None:
    """Gives `variable` a value and metadata, and makes it part of the current trace."""
    variable.__setstate__(type(variable).from_metadata(value, metadata).__getstate__())


@dataclasses.dataclass(frozen=True, eq=False)
class VariableOutcome:
    """A variable at the end of a trace.

    Attributes:
      entry: its static part.
      origin: its number in the plan, or that of the variable whose place it has taken in an
        equal graph; None for another variable that the trace created.
      is_replaced: whether it has taken the place of its origin, which keeps its value.
      is_changed: whether the variable or its value is new. Needed because a new value without
        arrays (None) has no leaf that could show it.
    """

    entry: Entry
    origin: int | None
    is_changed: bool = False
    is_replaced: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """The static part of objects at the end of a trace.

    Attributes:
      graphdef: their graph if it changed (attributes, new or replaced parts), else None.
      variables: their variables, in graph order.
      shards: the numbers of the leaves that are returned as the replicas' shards.
    """

    graphdef: PyTree
    variables: tuple[VariableOutcome, ...]
    shards: frozenset[int] = frozenset()


class TracedNNXObjects:
    """The user's own objects while they hold the values of a trace.

    Args:
      plan: the static part of the objects.
      objects: the objects.
      variables: their variables and bare arrays, in the order of the plan.
    """

    def __init__(self, plan: Plan, objects: Sequence[Any], variables: Sequence[Any]):
        self._plan, self._objects, self._variables = plan, objects, variables
        self._in_replica = False
        graph = list(nnx.iter_graph(tuple(objects), graph=True))
        self._nodes = {path: node for path, node in graph if isinstance(node, nnx.Pytree)}
        self._in_variables = [v for v in variables if isinstance(v, nnx.Variable)]
        self._on_host = [v for v in self._in_variables if has_hook(v)]
        self._numbers = nnx.graph.RefMap()
        self._graphdef: PyTree = None
        self._graphdef_of_same: Any = None  # with the numbers of the parts: none was replaced
        self._start: list[list[Any]] = []

    def save(self) -> SavedState:
        """Returns the current state of the objects."""
        return SavedState([*self._nodes.values()], self._in_variables)

    def enter(
        self, leaves: Sequence[Any], paths: Sequence[Any], context: ReplicaContext | None
    ) -> None:
        """Makes the objects hold traced values.

        Args:
          leaves: the arrays of the objects in this trace.
          paths: the path of each variable in the graph.
          context: the replica context; None in the global view.
        """
        plan, self._in_replica = self._plan, context is not None
        if context is None and plan.live_strategy is not None:  # so that a `run` inside finds it
            assign_unassigned([*self._nodes.values()], plan.live_strategy)
        seen = [
            _view_leaf(leaf, layout, entry, context)
            for leaf, (layout, entry) in zip(leaves, _layouts(plan), strict=True)
        ]
        values = values_of(plan, seen)
        bare = {}
        for variable, value, path in zip(self._variables, values, paths, strict=True):
            if isinstance(variable, nnx.Variable):
                set_in_trace(variable, value, metadata_without(variable))
            else:
                bare[tuple(path)] = value
        for path, node in self._nodes.items():
            _renew_trees(path, node, bare)
        self._graphdef, flat = nnx.graph.flatten(
            tuple(self._objects), ref_index=self._numbers, graph=True
        )
        self._graphdef_of_same, _ = self._flatten()
        _require_held(plan, [raw_value(v) for v in flat.leaves], values)
        if context is not None and context.num_replicas_in_sync > 1:
            _empty_other_parts(plan, self._objects, context.replica_id_in_sync_group)
        self._start = [jax.tree.leaves(raw_value(v), is_leaf=is_per_replica) for v in flat.leaves]

    def remaining_members(self) -> dict[int, Any]:
        """Returns the variables of the plan that the objects still have, by number."""
        left = {id(node) for _, node in nnx.iter_graph(tuple(self._objects))}
        variables = enumerate(self._variables)
        return {i: v for i, v in variables if isinstance(v, nnx.Variable) and id(v) in left}

    def collect(self, even_unchanged: frozenset[int]) -> tuple[Outcome, dict[int, Any]]:
        """Returns the static part at the end, and the leaves that changed, by number.

        The numbers are those of the plan; if the graph changed, those of the new graph.
        """
        require_no_traced_values(self._objects)
        graphdef, flat = self._flatten()
        if graphdef.with_no_outer_index() == self._graphdef and self._are_in_place(flat.leaves):
            values = [raw_value(v) for v in flat.leaves]
            if all(map(self._is_update, flat.leaves, values, self._plan.entries, self._start)):
                replaced = None if graphdef == self._graphdef_of_same else graphdef
                return self._collect_updates(flat.leaves, values, even_unchanged, replaced)
        add_hooks(self._on_host)
        owners = [i for i, entry in enumerate(self._plan.entries) for _ in entry.layouts]
        return self._collect_graph(*self._flatten(), {owners[number] for number in even_unchanged})

    def _flatten(self) -> tuple[Any, Any]:
        return nnx.graph.flatten(tuple(self._objects), ref_outer_index=self._numbers, graph=True)

    def _are_in_place(self, leaves: Sequence[Any]) -> bool:
        """Returns whether none of the variables has taken the place of another one."""
        known = set(map(id, self._in_variables))
        pairs = zip(leaves, self._variables, strict=True)
        return all(now is before or id(now) not in known for now, before in pairs)

    def _is_update(
        self, variable: nnx.Variable[Any] | jax.Array, value: object, entry: Entry, start: list[Any]
    ) -> bool:
        """Returns whether a value takes the place of that of the variable which was there."""
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
        is_same = all(a is b for a, b in zip(leaves, start, strict=False))
        return treedef == entry.treedef and (isinstance(variable, nnx.Variable) or is_same)

    def _collect_updates(
        self,
        variables: Sequence[Any],
        values: Sequence[Any],
        even_unchanged: frozenset[int],
        graphdef: PyTree,
    ) -> tuple[Outcome, dict[int, Any]]:
        finals, shards = {}, set()
        starts = [leaf for leaves in self._start for leaf in leaves]
        current = [leaf for v in values for leaf in jax.tree.leaves(v, is_leaf=is_per_replica)]
        places = [entry for _, entry in _layouts(self._plan)]
        same = [a is b for a, b in zip(starts, current, strict=True)]
        combined = self._find_combined_metrics(places, same)
        for number, (leaf, entry) in enumerate(zip(current, places, strict=True)):
            if same[number] and number not in even_unchanged and _metric_of(entry) not in combined:
                continue
            finals[number], is_shard = self._as_shard(leaf)
            if is_shard:
                shards.add(number)
        pairs = zip(self._plan.entries, variables, self._variables, strict=True)
        outcomes = tuple(
            VariableOutcome(entry, i, is_replaced=is_variable(now) and now is not before)
            for i, (entry, now, before) in enumerate(pairs)
        )
        return Outcome(graphdef, outcomes, frozenset(shards)), finals

    def _find_combined_metrics(self, entries: Sequence[Entry], same: Sequence[bool]) -> set[int]:
        """Returns the changed metrics that are combined by a function, which needs all state."""
        changed = {
            _metric_of(entry) for entry, is_same in zip(entries, same, strict=True) if not is_same
        }
        return {
            i for i, (_, combine) in enumerate(self._plan.metrics) if callable(combine)
        } & changed

    def _as_shard(self, value: PyTree) -> tuple[Any, bool]:
        state = frames.current().state
        held = state.shard_of(value) if self._in_replica and state is not None else None
        return (value, False) if held is None else (held[0], True)

    def _collect_graph(
        self,
        graphdef: nnx.GraphDef[Any],
        flat: nnx.statelib.FlatState[Any],
        kept: Container[int | None],
    ) -> tuple[Outcome, dict[int, Any]]:
        """Implements `collect` for a changed graph.

        Args:
          graphdef: the new graph.
          flat: the paths and variables in it.
          kept: the variables whose leaves are returned even if unchanged.
        """
        known = {id(v): i for i, v in enumerate(self._variables) if isinstance(v, nnx.Variable)}
        outcomes: list[tuple[VariableOutcome, list[Any]]] = []  # with the leaves
        for path, variable in zip(flat.paths, flat.leaves, strict=True):
            leaves, treedef = jax.tree.flatten(raw_value(variable), is_leaf=is_per_replica)
            origin = known.get(id(variable))
            known_entry = None if origin is None else self._plan.entries[origin]
            name = known_entry.path if known_entry else path_of(self._objects, path)
            metric = known_entry.metric if known_entry else None
            entry = make_entry(self._plan.live_strategy, variable, name, leaves, treedef, metric)
            is_changed = origin is None or not self._is_unchanged(origin, leaves, treedef)
            outcomes.append((VariableOutcome(entry, origin, is_changed), leaves))
        combined = self._find_combined_metrics(
            [after.entry for after, _ in outcomes], [not after.is_changed for after, _ in outcomes]
        )
        finals, number = {}, 0
        for after, leaves in outcomes:
            if after.is_changed or after.origin in kept or _metric_of(after.entry) in combined:
                finals.update((number + i, leaf) for i, leaf in enumerate(leaves))
            number += len(leaves)
        return Outcome(graphdef, tuple(after for after, _ in outcomes)), finals

    def _is_unchanged(
        self, origin: int, leaves: Sequence[Any], treedef: jax.tree_util.PyTreeDef
    ) -> bool:
        """Returns whether a variable still has the value that it had at the start."""
        start = self._start[origin]
        is_same_tree = treedef == self._plan.entries[origin].treedef
        return is_same_tree and all(a is b for a, b in zip(leaves, start, strict=True))


def _metric_of(entry: Entry) -> int | None:
    return None if entry.metric is None else entry.metric[0]


def _layouts(plan: Plan) -> list[tuple[Any, Entry]]:
    return [(layout, entry) for entry in plan.entries for layout in entry.layouts]


def _renew_trees(path: Sequence[Any], node: PyTree, bare: dict[tuple[Any, ...], Any]) -> None:
    """Copies a module's mutable attributes for the trace, which may change them in place.

    This includes the state with Flax's mark of the trace. Variables and modules inside stay
    the user's own; bare arrays are replaced, by path, with those of the trace.
    """
    attributes = vars(node)
    for name, tree in [*attributes.items()]:
        place = (*path, name)
        if place in bare:
            attributes[name] = bare[place]
        elif not _is_part(tree) and _is_renewed(tree):
            attributes[name] = jax.tree_util.tree_map_with_path(
                lambda keys, x, place=place: bare.get((*place, *map(_key, keys)), x),
                tree,
                is_leaf=_is_part,
            )


def _is_renewed(tree: PyTree) -> bool:
    """Returns whether a tree may hold parts or arrays; any other is static and is kept."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_part)
    if any(x is tree for x in leaves):
        return False
    return not leaves or any(_is_part(x) or is_array(x) for x in leaves)


def _is_part(value: object) -> bool:
    return isinstance(value, nnx.Variable) or nnx.graph.is_graph_node(value)


def _key(entry: object) -> Any:
    """Converts a key of a JAX path to a key of a Flax path."""
    return next(getattr(entry, k) for k in ("key", "idx", "name") if hasattr(entry, k))


def _require_held(plan: Plan, held: Sequence[Any], values: Sequence[Any]) -> None:
    """Raises if the objects do not hold the values that they were given."""
    for entry, now, value in zip(plan.entries, held, values, strict=True):
        if now is not value:
            raise UnsupportedError(
                message(
                    f"{entry.path} needs to be a variable to be taken into a program",
                    got="an array in a node that is no nnx.Module",
                    why="a program gives the objects the values of its trace, and only Flax's "
                    "own classes say where they hold them",
                    fix="nnx.Variable(array) in its place, or an nnx.Module around it",
                )
            )


def _view_leaf(
    leaf: PyTree, layout: Layout | None, entry: Entry, context: ReplicaContext | None
) -> Any:
    """Returns a leaf as the traced function sees it."""
    if context is None:
        return leaf
    if layout is not None and layout.local_form.is_split:
        return frames.current().state.whole(leaf, layout.local_form)
    if entry.rule == rules.FOLD:
        number = context.replica_id_in_sync_group
        if context.num_replicas_in_sync > 1:
            return _fold_keys(leaf, number)
        # One replica draws as without a strategy. The checks look at it as one of several, whose
        # keys differ: this says so, and XLA leaves nothing of it.
        return jnp.where(number == 0, leaf, leaf)
    return leaf


def _fold_keys(keys: jax.Array, number: ArrayLike) -> jax.Array:
    flat = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def _empty_other_parts(plan: Plan, objects: Sequence[Any], replica: ArrayLike | None) -> None:
    """Empties the metrics on all replicas but the first, so the old state counts once."""
    metrics = metrics_in(objects)
    for (metric, own), (_, combine) in zip(metrics, plan.metrics, strict=True):
        if combine is None:
            continue
        before = {name: raw_value(v) for name, v in own.items()}
        metric.reset()
        for name, variable in own.items():
            empty = jnp.asarray(raw_value(variable), before[name].dtype)
            variable.set_raw_value(jnp.where(replica == 0, before[name], empty))


# -- reconcile ----------------------------------------------------------------
# Combines the replicas' writes to each variable into one value, by the variable's rule.


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
    return entry.rule == rules.METRIC and _combine_rule(plan, entry) == SUM


def _by_rule(plan: Plan, outcome: Outcome, entry: Entry, value: PyTree, topology: Topology) -> Any:
    if entry.rule == rules.PER_REPLICA and topology.num_replicas > 1:
        return PerReplica(stack_replicas(from_user_value(value), topology), topology)
    if not isinstance(value, PerReplica):
        return value
    if entry.rule == rules.METRIC:
        metric = None if entry.metric is None else plan.metrics[entry.metric[0]][0].__name__
        refuse(entry.path, metric)
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
        whole = require_whole(kind, combine(_gather_parts(parts, topology)), numbers)
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
