"""The bridge for Flax NNX: implements the protocols of `distjax.objects.stateful`.

`flatten` flattens the objects of a call into one graph and a list of arrays, which become
inputs of the program. `unflatten` lets the objects hold tracers while the step is traced,
and restores them afterwards. `combine_writes` turns what the replicas wrote into one value per
variable, and `write_back` stores the program's outputs in the objects once it has run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from flax import nnx

from distjax import inner_traces, jax_compat
from distjax.context.contracts import StrategyLike
from distjax.flax import rules
from distjax.flax.graphs import (
    add_hooks,
    explain,
    explain_here,
    is_in_host_memory,
    is_object,
    is_variable,
    objects_placed_for,
    references,
)
from distjax.flax.plans import (
    Objects,
    as_argument,
    as_stored_output,
    as_value,
    flatten_objects,
    layout_of,
    raw_value,
    write_entries,
)
from distjax.flax.traced_objects import Outcome, SavedState, TracedNNXObjects, combine_writes
from distjax.placement.per_replica import PerReplica, is_per_replica
from distjax.replica.contexts import ReplicaContext
from distjax.typing import PyTree
from distjax.variables.description import VariableDescription, describe_stored
from distjax.variables.layouts import Layout, StackedLayout

# -- module description -------------------------------------------------------
# Descriptions of NNX variables placed for a strategy, for `strategy.describe()`.


#: The aggregation of a `dj.Variable` that is equivalent to a rule.
_AGGREGATIONS = {rules.MEAN: "MEAN", rules.METRIC: "SUM"}


def describe_placed(strategy: StrategyLike) -> list[VariableDescription]:
    """Returns a description of each variable, named by its longest path in an object."""
    found: dict[int, tuple[tuple[Any, ...], Any]] = {}
    for node in objects_placed_for(strategy):
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
    ]


def _describe_leaf(
    name: str, variable: nnx.Variable[Any], leaf: jax.Array | PerReplica, strategy: StrategyLike
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


_JIT: Any = type(nnx.jit(lambda: None))
_STATES = (nnx.State, nnx.statelib.FlatState)

R = TypeVar("R")


class NNXObjectLeaves:
    """Flattened NNX objects; implements `distjax.objects.stateful.ObjectLeaves`."""

    def __init__(self, objects: Objects):
        self._objects = objects
        self.plan, self.leaves = objects.plan, objects.leaves
        self.owners = objects.plan.owners
        self.members = objects.graph.variables
        self._references: Any = None

    def as_inputs(self, leaves: Sequence[Any], for_replicas: bool) -> list[Any]:
        """Converts stored leaves to the global view, as arguments of `run` or as values."""
        strategy = self.plan.live_strategy
        pairs = zip(leaves, self.plan.layouts, strict=True)
        if strategy is None or not for_replicas:
            return [as_value(x, layout) for x, layout in pairs]
        topology = strategy.extended.topology
        return [as_argument(x, layout, topology) for x, layout in pairs]

    def unflatten(
        self,
        leaves: Sequence[Any],
        context: ReplicaContext | None,
        body: Callable[[TracedNNXObjects], R],
    ) -> R:
        """Returns the result of `body`, called while the objects hold traced values."""
        # An inner function that closes over an object would leak these tracers to later traces.
        inner_traces.forget_inner_traces(jax_compat.current_trace())
        graph = self._objects.graph
        traced = TracedNNXObjects(self.plan, self._objects.objects, graph.variables)
        saved = traced.save()
        try:
            try:
                traced.enter(leaves, graph.paths, context)
                return body(traced)
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

    def combine_writes(
        self, outcome: Outcome, finals: Mapping[int, Any], strategy: StrategyLike | None
    ) -> dict[int, Any]:
        """Returns the written values in stored form; replicas' writes are combined by rule."""
        if strategy is not None:
            return combine_writes(self.plan, outcome, finals, strategy)
        if self.plan.live_strategy is None:
            return dict(finals)
        layouts = [layout for variable in outcome.variables for layout in variable.entry.layouts]
        return {i: as_stored_output(value, layouts[i]) for i, value in finals.items()}

    def write_back(self, outcome: Outcome, stored: Mapping[int, Any]) -> None:
        """Writes the new values to the objects, and their new graph if it changed."""
        after = self._new_values(outcome, stored)
        variables = self._objects.graph.variables
        if outcome.graphdef is None:
            write_entries(variables, after)
        else:
            own = {
                v.origin: after[i]
                for i, v in enumerate(outcome.variables)
                if i in after and v.origin is not None and not v.is_replaced
            }
            write_entries(variables, own)  # first: building the graph calls the user's classes
            self._write_graph(outcome, after)
        if self.plan.strategy is None:  # a `run` in the program may have placed the objects
            held = filter(is_in_host_memory, filter(is_variable, variables))
            add_hooks(held)

    def _write_graph(self, outcome: Outcome, after: Mapping[int, Any]) -> None:
        """Gives the objects their new graph, or, if a class in it raises, leaves them the old."""
        objects, variables = self._objects.objects, self._objects.graph.variables
        if self._references is None:  # kept, so that a retry after a signal sees the old graph
            self._references = nnx.graph.IndexMap.from_refmap(references(objects))
        values = [
            after[i] if v.origin is None or i in after else raw_value(variables[v.origin])
            for i, v in enumerate(outcome.variables)
        ]
        nodes = [x for x in self._references.values() if isinstance(x, nnx.Pytree)]
        before = SavedState(nodes, ())
        try:
            nnx.graph.unflatten(outcome.graphdef, values, outer_index_outer_ref=self._references)
        except BaseException:
            before.restore()
            raise

    def _new_values(self, outcome: Outcome, stored: Mapping[int, Any]) -> dict[int, Any]:
        """Returns, by number, the values of entries that have a new leaf, or no leaves at all.

        A changed entry of which no leaf is stored keeps its value: a key that each replica set.
        """
        values, number = {}, 0
        for i, variable in enumerate(outcome.variables):
            numbers = range(number, number + len(variable.entry.layouts))
            number += len(variable.entry.layouts)
            if any(n in stored for n in numbers) or (variable.is_changed and not numbers):
                values[i] = variable.entry.treedef.unflatten(
                    [stored[n] if n in stored else self.leaves[n] for n in numbers]
                )
        return values


class NNXBridge:
    """Implements `distjax.objects.stateful.Bridge` for Flax NNX."""

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

    def flatten(
        self,
        objects: Sequence[Any],
        strategy: StrategyLike | None,
        *,
        is_in_program: bool,
    ) -> NNXObjectLeaves:
        """Places the objects for `strategy` and returns them flattened."""
        return NNXObjectLeaves(flatten_objects(objects, strategy, is_in_program=is_in_program))

    def find_baked(self, constants: Sequence[Any]) -> str | None:
        """Returns a description of a variable whose array is among `constants`, or None."""
        for referrer in gc.get_referrers(*constants):
            if isinstance(referrer, nnx.Variable):
                return f"an nnx.{type(referrer).__name__} of shape {tuple(referrer.shape)}"
        return None


LAYER = NNXBridge()
