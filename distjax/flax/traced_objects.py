"""Traced objects: NNX objects put together inside a trace, and what they hold at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distjax.context import frames
from distjax.flax import host_reads, metric_rules, rules, static_attributes, strategy_of
from distjax.flax.plans import Entry, Plan, make_entry, raw_value, values_of
from distjax.placement.per_replica import is_per_replica


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """What is static of objects at the end of a trace.

    Attributes:
      graphdef: their graph where it changed (attributes, new variables), else None.
      entries: the variables of that graph.
      origins: per variable of it its number in the plan, None for a new one.
      shards: numbers of leaves that are handed over as the replicas' shards.
    """

    graphdef: Any
    entries: tuple[Entry, ...]
    origins: tuple[int | None, ...]
    shards: frozenset[int]


class TracedNNXObjects:
    """The objects of a plan, made of values inside a trace.

    Args:
      plan: what is static of the objects.
      leaves: their arrays, as this view sees them.
      context: the replica context; None in the global view.
    """

    def __init__(self, plan: Plan, leaves: Sequence[Any], context: Any):
        self._plan = plan
        self._in_replica = context is not None
        seen = [
            _view_leaf(leaf, layout, entry, context)
            for leaf, (layout, entry) in zip(leaves, _layouts(plan), strict=True)
        ]
        self._index = nnx.graph.IndexMap()
        self.objects = nnx.graph.unflatten(
            plan.graphdef, values_of(plan, seen), index_ref=self._index
        )
        if context is None and plan.strategy is not None:
            strategy_of.assign_strategy(
                self.objects, plan.strategy()
            )  # so that `run` inside can tell
        _, flat = nnx.graph.flatten(self.objects, graph=True)
        self._variables = list(flat.leaves)
        self._host_variables = host_reads.take_hooks(self._variables)
        if context is not None and context.num_replicas_in_sync > 1:
            _empty_other_parts(plan, self.objects, context.replica_id_in_sync_group)
        self._entry = [
            jax.tree.leaves(raw_value(v), is_leaf=is_per_replica) for v in self._variables
        ]

    def remaining_members(self) -> dict[int, Any]:
        """Returns the variables that the objects had at the start and still have, by number."""
        left = {id(node) for _, node in nnx.iter_graph(tuple(self.objects))}
        variables = enumerate(self._variables)
        return {i: v for i, v in variables if isinstance(v, nnx.Variable) and id(v) in left}

    def leave(self, keep_all: frozenset[int]) -> tuple[Outcome, dict[int, Any]]:
        """Returns what is static of the end, and the leaves that changed, by number.

        Leaves of a changed graph are numbered in the order of that graph.
        """
        static_attributes.require_no_traced_values(self.objects)
        host_reads.add_hooks(self._host_variables)
        outer = nnx.graph.RefMap.from_indexmap(self._index)
        graphdef, flat = nnx.graph.flatten(self.objects, ref_outer_index=outer, graph=True)
        if graphdef.with_no_outer_index() == self._plan.graphdef:
            values = [raw_value(v) for v in flat.leaves]
            if all(map(self._is_update, flat.leaves, values, self._plan.entries, self._entry)):
                return self._collect_updates(values, keep_all)
        return self._collect_graph(graphdef, flat)

    def _is_update(self, variable: Any, value: Any, entry: Entry, start: list[Any]) -> bool:
        """Returns whether a new value can be written to the variable as it is."""
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
        is_same = all(a is b for a, b in zip(leaves, start, strict=False))
        return treedef == entry.treedef and (isinstance(variable, nnx.Variable) or is_same)

    def _collect_updates(
        self, values: Sequence[Any], keep_all: frozenset[int]
    ) -> tuple[Outcome, dict[int, Any]]:
        finals, shards = {}, set()
        entries = [leaf for leaves in self._entry for leaf in leaves]
        ends = [leaf for v in values for leaf in jax.tree.leaves(v, is_leaf=is_per_replica)]
        places = [entry for _, entry in _layouts(self._plan)]
        same = [start is end for start, end in zip(entries, ends, strict=True)]
        combined = self._find_combined_metrics(places, same)
        for number, (end, entry) in enumerate(zip(ends, places, strict=True)):
            if same[number] and number not in keep_all and _metric_of(entry) not in combined:
                continue
            finals[number], is_shard = self._hand_over(end)
            if is_shard:
                shards.add(number)
        return Outcome(None, self._plan.entries, (), frozenset(shards)), finals

    def _find_combined_metrics(self, entries: Sequence[Entry], same: Sequence[bool]) -> set[int]:
        """Returns the metrics that changed and whose function combines all of their state."""
        changed = {
            _metric_of(entry) for entry, is_same in zip(entries, same, strict=True) if not is_same
        }
        return {
            i for i, (_, combine) in enumerate(self._plan.metrics) if callable(combine)
        } & changed

    def _hand_over(self, value: Any) -> tuple[Any, bool]:
        state = frames.current().state
        held = state.shard_of(value) if self._in_replica and state is not None else None
        return (value, False) if held is None else (held[0], True)

    def _name(self, path: Sequence[Any]) -> str:
        root = type(self.objects[int(str(path[0]))]).__name__
        return ".".join([root, *map(str, path[1:])])

    def _collect_graph(self, graphdef: Any, flat: Any) -> tuple[Outcome, dict[int, Any]]:
        known = {id(v): i for i, v in enumerate(self._variables) if isinstance(v, nnx.Variable)}
        strategy = None if self._plan.strategy is None else self._plan.strategy()
        entries, origins, ends, same = [], [], [], []
        for path, variable in zip(flat.paths, flat.leaves, strict=True):
            leaves, treedef = jax.tree.flatten(raw_value(variable), is_leaf=is_per_replica)
            origin = known.get(id(variable))
            known_entry = None if origin is None else self._plan.entries[origin]
            name = known_entry.path if known_entry else self._name(path)
            metric = known_entry.metric if known_entry else None
            entry = make_entry(strategy, variable, name, leaves, treedef, metric)
            is_same = origin is not None and all(
                a is b for a, b in zip(leaves, self._entry[origin], strict=False)
            )
            entries.append(entry)
            origins.append(origin)
            ends.append(leaves)
            same.append(is_same)
        combined = self._find_combined_metrics(entries, same)
        finals, number = {}, 0
        for entry, leaves, is_same in zip(entries, ends, same, strict=True):
            if not is_same or _metric_of(entry) in combined:
                finals.update((number + i, leaf) for i, leaf in enumerate(leaves))
            number += len(leaves)
        return Outcome(graphdef, tuple(entries), tuple(origins), frozenset()), finals


def _metric_of(entry: Entry) -> int | None:
    return None if entry.metric is None else entry.metric[0]


def _layouts(plan: Plan) -> list[tuple[Any, Entry]]:
    return [(layout, entry) for entry in plan.entries for layout in entry.layouts]


def _view_leaf(leaf: Any, layout: Any, entry: Entry, context: Any) -> Any:
    """Returns a leaf as the function that is traced sees it."""
    if context is None:
        return leaf
    if layout is not None and layout.local_form.is_split:
        return frames.current().state.whole(leaf, layout.local_form)
    if entry.rule == rules.FOLD and context.num_replicas_in_sync > 1:
        return _fold_keys(leaf, context.replica_id_in_sync_group)
    return leaf


def _fold_keys(keys: jax.Array, number: Any) -> jax.Array:
    flat = jax.vmap(lambda key: jax.random.fold_in(key, number))(keys.reshape(-1))
    return flat.reshape(keys.shape)


def _empty_other_parts(plan: Plan, objects: Sequence[Any], replica: Any) -> None:
    """Empties the metrics of all replicas but the first, so that each part counts once."""
    metrics = metric_rules.metrics_in(objects)
    for (metric, own), (_, combine) in zip(metrics, plan.metrics, strict=True):
        if combine is None:
            continue
        before = {name: raw_value(v) for name, v in own.items()}
        metric.reset()
        for name, variable in own.items():
            empty = jnp.asarray(raw_value(variable), before[name].dtype)
            variable.set_raw_value(jnp.where(replica == 0, before[name], empty))
