"""NNX objects while they hold traced values, and their state at the end of the trace.

The objects are the user's own, not copies, so a function sees the traced values however it
refers to them. Their former state is saved before the trace and restored after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distjax.context import frames
from distjax.errors import UnsupportedError, message
from distjax.flax import host_reads, metric_rules, rules, static_attributes, strategy_of
from distjax.flax.graph_cache import path_of
from distjax.flax.object_types import is_variable
from distjax.flax.plans import Entry, Plan, make_entry, raw_value, values_of
from distjax.flax.saved_state import SavedState, set_in_trace
from distjax.placement.per_replica import is_per_replica
from distjax.replica.arguments import is_array
from distjax.replica.contexts import ReplicaContext
from distjax.typing import ArrayLike, PyTree
from distjax.variables.layouts.layout import Layout


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
        self._on_host = [v for v in self._in_variables if host_reads.has_hook(v)]
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
            strategy_of.assign_unassigned([*self._nodes.values()], plan.live_strategy)
        seen = [
            _view_leaf(leaf, layout, entry, context)
            for leaf, (layout, entry) in zip(leaves, _layouts(plan), strict=True)
        ]
        values = values_of(plan, seen)
        bare = {}
        for variable, value, path in zip(self._variables, values, paths, strict=True):
            if isinstance(variable, nnx.Variable):
                set_in_trace(variable, value, host_reads.metadata_without(variable))
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
        static_attributes.require_no_traced_values(self._objects)
        graphdef, flat = self._flatten()
        if graphdef.with_no_outer_index() == self._graphdef and self._are_in_place(flat.leaves):
            values = [raw_value(v) for v in flat.leaves]
            if all(map(self._is_update, flat.leaves, values, self._plan.entries, self._start)):
                replaced = None if graphdef == self._graphdef_of_same else graphdef
                return self._collect_updates(flat.leaves, values, even_unchanged, replaced)
        host_reads.add_hooks(self._on_host)
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
    if entry.rule == rules.FOLD and context.num_replicas_in_sync > 1:
        return _fold_keys(leaf, context.replica_id_in_sync_group)
    return leaf


def _fold_keys(keys: jax.Array, number: ArrayLike) -> jax.Array:
    flat = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def _empty_other_parts(plan: Plan, objects: Sequence[Any], replica: ArrayLike | None) -> None:
    """Empties the metrics on all replicas but the first, so the old state counts once."""
    metrics = metric_rules.metrics_in(objects)
    for (metric, own), (_, combine) in zip(metrics, plan.metrics, strict=True):
        if combine is None:
            continue
        before = {name: raw_value(v) for name, v in own.items()}
        metric.reset()
        for name, variable in own.items():
            empty = jnp.asarray(raw_value(variable), before[name].dtype)
            variable.set_raw_value(jnp.where(replica == 0, before[name], empty))
