"""Flax NNX objects in a program: implements the contracts of `distjax._src.objects.stateful`.

The objects of a call are split into one graph and a list of arrays, which become inputs of the
program. While the step is traced, the objects hold traced values: the user's own objects, not
copies, so that a function sees these values however it refers to them. Their former state is saved
before and restored after. The program's outputs are stored in the objects once it has run.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

from distjax._src import jax_compat, traces
from distjax._src.context import StrategyLike, frames
from distjax._src.flax import rules
from distjax._src.flax.graphs import (
    FlatGraph,
    add_hooks,
    assign_unassigned,
    explain,
    explain_here,
    is_in_host_memory,
    is_object,
    is_variable,
    note_met,
    objects_of,
    path_of,
    put_back_strategies,
    references,
    require_no_traced_values,
    run_in_another_trace,
    strategy_records,
)
from distjax._src.flax.plans import (
    Entry,
    Plan,
    as_argument,
    as_value,
    flatten_objects,
    layout_of,
    make_entry,
    raw_value,
    values_of,
    write_entries,
)
from distjax._src.flax.rules import metrics_in
from distjax._src.flax.writes import Outcome, VariableOutcome, combine_writes
from distjax._src.placement import PerReplica, are_exchanged, is_per_replica
from distjax._src.replica.arguments import is_array
from distjax._src.replica.contexts import ReplicaContext
from distjax._src.typing import ArrayLike, PyTree
from distjax._src.variables.description import VariableDescription, describe_stored
from distjax._src.variables.layouts import Layout, StackedLayout, in_force
from distjax.errors import UnsupportedError

# -- saved state --------------------------------------------------------------
# The state of NNX objects, saved before a trace and restored after it.
#
# Flax lets an object change only in the trace that it was made in. `__setstate__`, which `pickle`
# uses, sets a variable's value, metadata and mark of the trace without that check.


class SavedState:
    """A snapshot: modules' attributes and strategies; variables' values, metadata, trace marks."""

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


def set_in_trace(variable: nnx.Variable[Any], value: PyTree) -> None:
    """Gives `variable` a value, and makes it part of the current trace."""
    own = type(variable).from_metadata(value, variable.get_metadata())
    variable.__setstate__(own.__getstate__())


# -- objects of a call ----------------------------------------------------------


class SplitNNX:
    """The NNX objects of a call; implements `distjax._src.objects.stateful.SplitObjects`."""

    def __init__(self, objects: Sequence[Any], plan: Plan, graph: FlatGraph, leaves: list[Any]):
        self.plan, self.leaves, self.owners = plan, leaves, plan.owners
        self.members = self._variables = graph.variables
        self._objects, self._paths = objects, graph.paths

    def as_inputs(self, leaves: Sequence[Any], for_replicas: bool) -> list[Any]:
        """Converts stored leaves to the global view, as arguments of `run` or as values."""
        strategy = self.plan.live_strategy
        pairs = zip(leaves, map(in_force, self.plan.layouts), strict=True)
        if strategy is None or not for_replicas:
            return [as_value(x, layout) for x, layout in pairs]
        topology = strategy.extended.topology
        return [as_argument(x, layout, topology) for x, layout in pairs]

    # -- in a trace -------------------------------------------------------------

    @contextlib.contextmanager
    def holding(self, leaves: Sequence[Any], context: ReplicaContext | None) -> Generator[None]:
        """A context in which the objects hold traced values."""
        # An inner function that closes over an object would leak these tracers to later traces.
        traces.forget_inner_traces(jax_compat.current_trace())
        graph = nnx.iter_graph(tuple(self._objects), graph=True)
        nodes = {path: node for path, node in graph if isinstance(node, nnx.Pytree)}
        variables = [v for v in self._variables if isinstance(v, nnx.Variable)]
        saved = SavedState([*nodes.values()], variables)
        try:
            try:
                self._enter(leaves, nodes, context)
                yield
                note_met([*nodes.values()])
            except Exception as error:
                explained = explain_here(error)  # before the marks are restored
                if explained is not None:
                    raise explained from error
                raise
            finally:
                saved.restore()
        except BaseException:  # also one raised by a signal before or during the restore
            saved.restore()
            raise

    def _enter(
        self, leaves: Sequence[Any], nodes: dict[Any, Any], context: ReplicaContext | None
    ) -> None:
        plan, self._in_replica = self.plan, context is not None
        if context is None and plan.live_strategy is not None:  # so that a `run` inside finds it
            assign_unassigned([*nodes.values()], plan.live_strategy)
        places = [(in_force(x), entry) for entry in plan.entries for x in entry.layouts]
        pairs = zip(leaves, places, strict=True)
        values = values_of(plan, [_view_leaf(leaf, *place, context) for leaf, place in pairs])
        bare = {}
        for variable, value, path in zip(self._variables, values, self._paths, strict=True):
            if isinstance(variable, nnx.Variable):
                set_in_trace(variable, value)
            else:
                bare[tuple(path)] = value
        for path, node in nodes.items():
            _renew_trees(path, node, bare)
        self._numbers = nnx.graph.RefMap()
        self._graphdef, flat = nnx.graph.flatten(
            tuple(self._objects), ref_index=self._numbers, graph=True
        )
        self._graphdef_of_same, _ = self._flatten()  # with the numbers: no part was replaced
        _require_held(plan, [raw_value(v) for v in flat.leaves], values)
        if context is not None and context.num_replicas_in_sync > 1:
            _empty_other_parts(plan, self._objects, context.replica_id_in_sync_group)
        self._start = [_leaves_of(raw_value(v)) for v in flat.leaves]

    def remaining_members(self) -> dict[int, Any]:
        """Returns the variables of the plan that the objects still have, by number."""
        left = {id(node) for _, node in nnx.iter_graph(tuple(self._objects))}
        return {i: v for i, v in enumerate(self._variables) if is_variable(v) and id(v) in left}

    def collect(self, even_unchanged: frozenset[int]) -> tuple[Outcome, dict[int, list[Any]]]:
        """Returns the static part at the end, and the leaves of changed variables, by number.

        The numbers are those of the plan; if the graph changed, those of the new graph.
        """
        plan = self.plan
        require_no_traced_values(self._objects)
        graphdef, flat = self._flatten()
        values = [raw_value(v) for v in flat.leaves]
        is_same = (
            graphdef.with_no_outer_index() == self._graphdef
            and self._are_in_place(flat.leaves)
            and all(map(self._is_update, flat.leaves, values, plan.entries, self._start))
        )
        known = {id(v): i for i, v in enumerate(self._variables) if is_variable(v)}
        after = []
        for i, (path, variable) in enumerate(zip(flat.paths, flat.leaves, strict=True)):
            origin = i if is_same else known.get(id(variable))
            is_replaced = is_same and is_variable(variable) and variable is not self._variables[i]
            entry = plan.entries[i] if is_same else self._entry_now(origin, variable, path)
            after.append(VariableOutcome(entry, origin, is_replaced))
        changed = {i for i, v in enumerate(values) if not self._is_unchanged(after[i].origin, v)}
        of_functions = {i for i, (_, combine) in enumerate(plan.metrics) if callable(combine)}
        # A function that combines a metric needs all of its state.
        whole = {_metric_of(after[i].entry) for i in changed} & of_functions
        owners = [i for i, entry in enumerate(plan.entries) for _ in entry.layouts]
        kept = {owners[number] for number in even_unchanged}
        finals, shards = {}, set()
        for i, (each, value) in enumerate(zip(after, values, strict=True)):
            if i in changed or each.origin in kept or _metric_of(each.entry) in whole:
                leaves = _leaves_of(value)
                held = [self._shard_of(leaf) for leaf in leaves]
                shards.update((i, k) for k, h in enumerate(held) if h is not None)
                pairs = zip(leaves, held, strict=True)
                finals[i] = [x if h is None else h[0] for x, h in pairs]
        new = None if is_same and graphdef == self._graphdef_of_same else graphdef
        return Outcome(new, tuple(after), frozenset(shards)), finals

    def _flatten(self) -> tuple[Any, Any]:
        return nnx.graph.flatten(tuple(self._objects), ref_outer_index=self._numbers, graph=True)

    def _are_in_place(self, leaves: Sequence[Any]) -> bool:
        """Returns whether none of the variables has taken the place of another one."""
        known = {id(v) for v in self._variables if is_variable(v)}
        pairs = zip(leaves, self._variables, strict=True)
        return all(now is before or id(now) not in known for now, before in pairs)

    def _is_update(
        self, variable: nnx.Variable[Any] | jax.Array, value: object, entry: Entry, start: list[Any]
    ) -> bool:
        """Returns whether a value takes the place of that of the variable which was there."""
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
        is_same = all(a is b for a, b in zip(leaves, start, strict=False))
        return treedef == entry.treedef and (isinstance(variable, nnx.Variable) or is_same)

    def _entry_now(self, origin: int | None, variable: PyTree, path: Sequence[Any]) -> Entry:
        before = None if origin is None else self.plan.entries[origin]
        name = path_of(self._objects, path) if before is None else before.path
        leaves, treedef = jax.tree.flatten(raw_value(variable), is_leaf=is_per_replica)
        metric = None if before is None else before.metric
        return make_entry(self.plan.live_strategy, variable, name, leaves, treedef, metric)

    def _is_unchanged(self, origin: int | None, value: PyTree) -> bool:
        """Returns whether a variable still has the value that it had at the start."""
        if origin is None:
            return False
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
        is_same_tree = treedef == self.plan.entries[origin].treedef
        return is_same_tree and all(
            a is b for a, b in zip(leaves, self._start[origin], strict=True)
        )

    def _shard_of(self, value: PyTree) -> Any:
        state = frames.current().state
        return state.shard_of(value) if self._in_replica and state is not None else None

    def combine_writes(
        self, outcome: Outcome, finals: Mapping[int, list[Any]], strategy: StrategyLike | None
    ) -> dict[int, list[Any]]:
        """Returns the written leaves in stored form; replicas' writes are combined by rule."""
        return combine_writes(self.plan, outcome, finals, strategy)

    def before(self, outcome: Outcome, number: int) -> list[tuple[str, Any]]:
        """Returns the name and the former value of each array of a variable."""
        entry, origin = outcome.variables[number].entry, outcome.variables[number].origin
        if origin is None:
            return [(entry.path, None) for _ in entry.layouts]
        start = sum(len(e.layouts) for e in self.plan.entries[:origin])
        own = self.leaves[start : start + len(self.plan.entries[origin].layouts)]
        return [(entry.path, value) for value in own]

    # -- after the program --------------------------------------------------------

    def write_back(self, outcome: Outcome, stored: Mapping[int, list[Any]]) -> None:
        """Writes the new values to the objects, and their new graph if it changed."""
        try:
            self._write_back(outcome, stored)
        except TraceContextError as error:
            raise run_in_another_trace(self._objects[0]) from error

    def _write_back(self, outcome: Outcome, stored: Mapping[int, list[Any]]) -> None:
        after = outcome.variables
        values = {i: after[i].entry.treedef.unflatten(leaves) for i, leaves in stored.items()}
        if outcome.graphdef is None:
            write_entries(self._variables, values)
        else:
            own = {
                v.origin: values[i]
                for i, v in enumerate(after)
                if i in values and v.origin is not None and not v.is_replaced
            }
            # First: building the graph calls the user's classes.
            write_entries(self._variables, own)
            self._write_graph(outcome, values)
        if self.plan.strategy is None:  # a `run` in the program may have placed the objects
            held = filter(is_in_host_memory, filter(is_variable, self._variables))
            add_hooks(held)

    def _write_graph(self, outcome: Outcome, new: Mapping[int, Any]) -> None:
        """Gives the objects their new graph, or, if a class in it raises, leaves them the old."""
        held = nnx.graph.IndexMap.from_refmap(references(self._objects))
        values = [
            new[i] if v.origin is None or i in new else raw_value(self._variables[v.origin])
            for i, v in enumerate(outcome.variables)
        ]
        nodes = [x for x in held.values() if isinstance(x, nnx.Pytree)]
        before = SavedState(nodes, ())
        try:
            nnx.graph.unflatten(outcome.graphdef, values, outer_index_outer_ref=held)
        except BaseException:
            before.restore()
            raise


def _metric_of(entry: Entry) -> int | None:
    return None if entry.metric is None else entry.metric[0]


def _leaves_of(value: PyTree) -> list[Any]:
    return jax.tree.leaves(value, is_leaf=is_per_replica)


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
                f"{entry.path} needs to be a variable to be taken into a program",
                got="an array in a node that is no nnx.Module",
                why="a program gives the objects the values of its trace, and only Flax's "
                "own classes say where they hold them",
                fix="nnx.Variable(array) in its place, or an nnx.Module around it",
            )


def _view_leaf(
    leaf: PyTree, layout: Layout | None, entry: Entry, context: ReplicaContext | None
) -> Any:
    """Returns a leaf as the traced function sees it."""
    if context is None:
        return leaf
    if layout is not None and layout.local_form.is_split:
        return frames.current().state.whole(leaf, layout.local_form, _told_name(entry.path))
    if entry.rule == rules.FOLD:
        number = context.replica_id_in_sync_group
        if context.num_replicas_in_sync > 1 or are_exchanged():
            return _fold_keys(leaf, number)
        # One replica draws as without a strategy. The checks look at it as one of several, whose
        # keys differ: this says so, and XLA leaves nothing of it.
        return jnp.where(number == 0, leaf, leaf)
    return leaf


def _told_name(path: str) -> str:
    """Returns what a report calls an array by: its part of the object, or the optimizer's state."""
    parts = path.split(".")
    count = parts.index("opt_state") + 1 if "opt_state" in parts else 2
    return re.sub(r"[^\w.]", "_", ".".join(parts[:count]))


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


# -- module description -------------------------------------------------------
# Descriptions of NNX variables placed for a strategy, for `strategy.describe()`.


#: The aggregation of a `dj.Variable` that is equivalent to a rule.
_AGGREGATIONS = {rules.MEAN: "MEAN", rules.METRIC: "SUM"}


def describe_placed(strategy: StrategyLike) -> list[VariableDescription]:
    """Returns a description of each variable, named by its longest path in an object."""
    found: dict[int, tuple[tuple[Any, ...], Any]] = {}
    for node in objects_of(strategy):
        for path, variable in nnx.iter_graph(node):
            if not isinstance(variable, nnx.Variable):
                continue
            name = (type(node).__name__, *path)
            if len(name) > len(found.get(id(variable), ((), None))[0]):
                found[id(variable)] = (name, variable)
    named = sorted((".".join(map(str, path)), id(v), v) for path, v in found.values())
    return [
        _describe_leaf(name, variable, leaf, strategy)
        for name, _, variable in named
        for leaf in jax.tree.leaves(raw_value(variable), is_leaf=is_per_replica)
        if isinstance(leaf, (jax.Array, PerReplica))
        or (traces.is_struct(leaf) and leaf.sharding is not None)  # which stands for one
    ]


def _describe_leaf(
    name: str, variable: nnx.Variable[Any], leaf: PyTree, strategy: StrategyLike
) -> VariableDescription:
    rule = rules.rule_of(variable)
    if isinstance(leaf, PerReplica):
        layout: Layout = StackedLayout(leaf.topology)
        stored, shape = leaf.stacked, leaf.stacked.shape[1:]
    else:
        layout = layout_of(strategy, variable, leaf.shape, leaf.dtype)
        stored, shape = leaf, leaf.shape
    return describe_stored(
        name,
        stored,
        layout,
        shape=shape,
        synchronization="ON_READ" if rule == rules.PER_REPLICA else "ON_WRITE",
        aggregation=_AGGREGATIONS.get(rule, "NONE"),
        trainable=rules.is_parameter(variable),
    )


# -- the library ----------------------------------------------------------------

_JIT: Any = type(nnx.jit(lambda: None))
_STATES = (nnx.State, nnx.statelib.FlatState)


class NNXBridge:
    """Implements `distjax._src.objects.stateful.ObjectLibrary` for Flax NNX."""

    is_stateful = staticmethod(is_object)
    is_member = staticmethod(is_variable)
    explain = staticmethod(explain)
    describe = staticmethod(describe_placed)

    def with_own_values(self, tree: PyTree) -> Any:
        """Returns `tree` with variables of its own in each `nnx.State`.

        `nnx.merge` makes modules of a state's own variables, and `nnx.split` hands out those of the
        module: a step would write to what the user keeps as the state before it.
        """

        def is_leaf(value: object) -> bool:
            return isinstance(value, _STATES) or is_object(value) or is_per_replica(value)

        def own(value: PyTree) -> PyTree:
            return jax.tree.map(lambda x: x, value) if isinstance(value, _STATES) else value

        return jax.tree.map(own, tree, is_leaf=is_leaf)

    def unwrap(self, fn: PyTree) -> Any:
        """Returns the function under an `nnx.jit`: it becomes part of a larger program."""
        return fn.fun if type(fn) is _JIT and fn.in_shardings is None else fn

    def split(
        self, objects: Sequence[Any], strategy: StrategyLike | None, *, is_in_program: bool
    ) -> SplitNNX:
        """Places the objects for `strategy` and returns them split into arrays."""
        return SplitNNX(objects, *flatten_objects(objects, strategy, is_in_program=is_in_program))

    def find_baked(self, constants: Sequence[Any]) -> str | None:
        """Returns a description of a variable whose array is among `constants`, or None."""
        for referrer in gc.get_referrers(*constants):
            if isinstance(referrer, nnx.Variable):
                return f"an nnx.{type(referrer).__name__} of shape {tuple(referrer.shape)}"
        return None


LAYER = NNXBridge()
