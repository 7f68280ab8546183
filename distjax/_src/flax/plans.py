"""Plans: NNX objects taken apart into a static plan and a list of arrays.

A plan is what a program is compiled for: the graph, and for each variable its rule and the
placement of its arrays. Plans compare by identity, so equal graphs with arrays of equal shapes must
get the same plan; a cache per strategy ensures that.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distjax._src import jax_compat
from distjax._src.cluster.job import job
from distjax._src.cluster.meeting import ComparedFact, agree, describe_on_host
from distjax._src.cluster.programs import record_write
from distjax._src.context import StrategyLike
from distjax._src.flax import rules, specs
from distjax._src.flax.graphs import (
    FlatGraph,
    add_hooks,
    assign_strategy,
    common_strategy,
    flatten_graph,
    is_outside,
    is_variable,
    not_found,
    path_of,
    require_hashable,
)
from distjax._src.flax.rules import combine_of, metrics_as_key, metrics_in
from distjax._src.objects.stateful import one_at_a_time
from distjax._src.placement import (
    PerReplica,
    Spec,
    Topology,
    is_host_memory,
    is_per_replica,
    transfer,
    without_alias,
)
from distjax._src.replica.global_value import AlreadyPlaced
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.traces import is_struct
from distjax._src.typing import DTypeLike, PyTree
from distjax._src.variables.layouts import (
    Layout,
    LocalForm,
    MirroredLayout,
    VariablePlacement,
    found_layout,
    layout_by,
)
from distjax.errors import UnsupportedError

# -- layouts ------------------------------------------------------------------
# Where the arrays of Flax variables live between steps, by strategy and variable type.


def layout_of(
    strategy: StrategyLike,
    variable: nnx.Variable[Any] | jax.Array,
    shape: Sequence[int],
    dtype: DTypeLike,
) -> Layout:
    """Returns where an array of a variable lives under `strategy`.

    Parameters live where the strategy puts variables, optimizer state where it puts
    variables colocated with others, and everything else on each replica. The arrays are
    stored unencoded, since code other than distjax reads them too.
    """
    shape, extended = tuple(shape), strategy.extended
    placement: VariablePlacement = extended.placement  # pyright: ignore[reportAttributeAccessIssue]
    spec = specs.spec_of_variable(variable, shape, extended.topology)
    if rules.is_parameter(variable) or not placement.synchronizes:
        return layout_by(placement, shape, dtype, None, spec).unencoded(shape)
    if isinstance(variable, nnx.OptState):
        beside = _Parameter(shape, dtype, layout_by(placement, shape, dtype, None, spec))
        return layout_by(placement, shape, dtype, beside, spec).unencoded(shape)
    return MirroredLayout(extended.topology, spec)


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """Stands in for a `dj.Variable` where a placement is asked about a parameter."""

    shape: tuple[int, ...]
    dtype: Any
    layout: Layout


def gradient_form(extended: StrategyExtended, parameter: jax.Array, spec: Spec) -> LocalForm:
    """Returns the local form of a gradient that is reduced to a parameter of this spec."""
    shape, dtype = tuple(parameter.shape), parameter.dtype
    target = _Parameter(shape, dtype, layout_by(extended.placement, shape, dtype, None, spec))
    return extended.placement.reduction_layout(target).unencoded(shape).local_form


def place_arrays(
    values: Sequence[PyTree], layouts: Sequence[Layout | None], paths: Sequence[str]
) -> list[Any]:
    """Moves arrays to where they live; returns those already there unchanged. Not for traces.

    Objects that span processes are compared at their first use.
    """
    pairs = list(zip(values, layouts, strict=True))
    if job() is not None:
        shared = [i for i, layout in enumerate(layouts) if _spans_processes(layout)]
        moved = [(paths[i], values[i]) for i in shared if not _is_there(*pairs[i])]
        _compare(moved, are_new=len(moved) == len(shared))
    return [place_array(value, layout) for value, layout in pairs]


def _compare(moved: Sequence[tuple[str, PyTree]], are_new: bool) -> None:
    """Compares values that are about to be moved to arrays that span processes.

    New objects are compared at once, in a meeting of all processes. A value that the user puts
    into an object later, perhaps at each step, is only noted for the comparison in the background.
    """
    if are_new and moved:
        values = [
            ComparedFact(f"value {i}, {path}", describe_on_host(value))
            for i, (path, value) in enumerate(moved)
        ]
        agree("the first use of NNX objects", values, known_by=values)
    else:
        for path, value in moved:
            record_write(f"a write of {path}", value)


def _spans_processes(layout: Layout | None) -> bool:
    sharding = layout.sharding if layout is not None else None
    return sharding is not None and not sharding.is_fully_addressable


def place_array(value: PyTree, layout: Layout | None) -> Any:
    """Moves an array to where it lives; returns it unchanged if it is there. Not for traces."""
    if layout is None or layout.sharding is None or _is_there(value, layout):
        return value
    value = value if is_struct(value) else jnp.asarray(without_alias(value))
    return transfer(value, layout.sharding)


def _is_there(value: PyTree, layout: Layout | None) -> bool:
    if layout is None or isinstance(value, PerReplica):
        return True
    if not isinstance(value, jax.Array) or not value.committed:
        return False  # an uncommitted one would cost a second compilation
    return value.sharding == found_layout(layout, value.sharding).sharding


def as_value(stored: PyTree, layout: Layout | None) -> Any:
    """Returns the global value of a stored array, in a trace."""
    if layout is None or isinstance(stored, PerReplica):
        return stored
    return layout.from_stored(stored, stored.shape)


def as_argument(stored: PyTree, layout: Layout | None, topology: Topology) -> Any:
    """Returns a stored array as an argument of `run`: the shards if it is split."""
    value = as_value(stored, layout)
    if layout is None or isinstance(value, PerReplica) or not layout.local_form.is_split:
        return value
    return PerReplica(layout.local_form.to_replicas(value), topology)


def as_stored_output(value: PyTree, layout: Layout | None) -> Any:
    """Returns a global value in its stored form, in a trace."""
    if isinstance(value, PerReplica):
        return value
    return AlreadyPlaced(value if layout is None else layout.constrain(layout.to_stored(value)))


BARE = "array"  #: the kind of an array that is an attribute by itself, in no variable


@dataclasses.dataclass(frozen=True, eq=False)
class Entry:
    """The static part of one variable of the objects; of a bare array, the kind is `BARE`.

    `layouts` says where each of its arrays lives (None: anywhere); `metric` is the number of the
    metric that it belongs to and its name there.
    """

    path: str
    kind: str
    rule: str
    layouts: tuple[Layout | None, ...]
    treedef: Any
    metric: tuple[int, str] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The static part of flattened objects, in graph order; compares by identity.

    `owners` has for each leaf the number of the object in which it was first found, `metrics` for
    each metric its class and how its parts are combined (None: not registered). `strategy` is a
    weak reference, or None.
    """

    graphdef: Any
    entries: tuple[Entry, ...]
    owners: tuple[int, ...]
    metrics: tuple[tuple[type, Any], ...]
    strategy: Any

    @property
    def live_strategy(self) -> StrategyLike | None:
        """The strategy that they live under, or None."""
        return None if self.strategy is None else self.strategy()

    def is_for(self, strategy: StrategyLike | None) -> bool:
        """Returns whether the objects live under `strategy` (None: under none)."""
        if strategy is None or self.strategy is None:
            return strategy is self.strategy
        return self.strategy() is strategy

    @functools.cached_property
    def layouts(self) -> list[Layout | None]:
        """Where each leaf lives."""
        return [layout for entry in self.entries for layout in entry.layouts]

    @functools.cached_property
    def in_host_memory(self) -> list[int]:
        """The numbers of the variables with arrays in host memory."""
        return [
            i
            for i, entry in enumerate(self.entries)
            if entry.kind != BARE
            and any(x is not None and is_host_memory(x.sharding) for x in entry.layouts)
        ]

    def __repr__(self) -> str:
        return f"state of {len(self.entries)} variables"


def flatten_objects(
    objects: Sequence[Any],
    strategy: StrategyLike | None,
    *,
    is_in_program: bool = False,
) -> tuple[Plan, FlatGraph, list[Any]]:
    """Places objects for `strategy`; returns their plan, their graph and their arrays.

    Without one, they stay with that which they were placed for. If they are met `is_in_program`, a
    trace meets them, whose call has found them.
    """
    if is_in_program:
        graph = FlatGraph(objects)
        _require_in_trace(graph.variables)
    else:
        if strategy is not None and strategy.extended.topology.model_axes:
            specs.learn(objects, strategy)
        graph = flatten_graph(objects)
    strategy = _assign_strategy(objects, graph, strategy)
    values = [raw_value(v) for v in graph.variables]
    leaves, structure = jax.tree.flatten(values, is_leaf=is_per_replica)
    plan = _plan(objects, strategy, graph, leaves, structure)
    if strategy is None or jax_compat.tracing():
        return plan, graph, leaves
    stored = _place(plan, graph, leaves)
    if add_hooks(graph.variables[i] for i in plan.in_host_memory):
        return flatten_objects(objects, strategy)  # metadata is part of the graph
    return plan, graph, stored


def _assign_strategy(
    objects: Sequence[Any], graph: FlatGraph, strategy: StrategyLike | None
) -> StrategyLike | None:
    """Makes objects belong to `strategy`; returns it, or for None the one they belong to."""
    if strategy is None:
        return common_strategy(objects)
    known = graph.last_lookup[1]
    is_known = known is not None and known.is_for(strategy)
    assign_strategy(objects, strategy, is_known)
    return strategy


def _place(plan: Plan, graph: FlatGraph, leaves: list[Any]) -> list[Any]:
    """Returns the leaves where the plan says, having written those that moved to the objects."""
    paths = [entry.path for entry in plan.entries for _ in entry.layouts]
    stored = place_arrays(leaves, plan.layouts, paths)
    if any(s is not x for s, x in zip(stored, leaves, strict=True)):
        write_entries(graph.variables, dict(enumerate(values_of(plan, stored))))
    return stored


def place_objects(objects: Sequence[Any], strategy: StrategyLike) -> None:
    """Moves the arrays of objects to where `strategy` keeps them."""
    with one_at_a_time:
        flatten_objects(objects, strategy)


def _require_in_trace(variables: Sequence[Any]) -> None:
    """Raises for a variable that the call did not find: its value would be a constant."""
    for variable in variables:
        if isinstance(variable, nnx.Variable) and is_outside(variable):
            raise not_found(variable)


def raw_value(variable: PyTree) -> Any:
    """Returns the value that a variable holds, bypassing its hooks; a bare array as it is."""
    if not is_variable(variable):
        return variable
    if variable.ref or variable.hijax:
        raise UnsupportedError(
            f"{type(variable).__name__} needs to hold an array to be taken into a program",
            got="a variable made with ref=True or hijax=True",
            why="a reference cannot be split over replicas and written back",
            fix="make it without: nnx.Param(value), or nnx.var_defaults(ref=False)",
        )
    return variable.get_raw_value()


def values_of(plan: Plan, leaves: Sequence[Any]) -> list[Any]:
    """Returns the value of each entry of `plan`, assembled from the leaves."""
    remaining = iter(leaves)
    return [
        entry.treedef.unflatten([next(remaining) for _ in entry.layouts]) for entry in plan.entries
    ]


def write_entries(variables: Sequence[Any], values: Mapping[int, Any]) -> None:
    """Writes values to variables, by number; skips bare arrays, which the graph holds."""
    for i, value in values.items():
        if is_variable(variables[i]):
            variables[i].set_raw_value(value)


# -- plan cache ----------------------------------------------------------------

# Keyed weakly by strategy; `_NO_STRATEGY` stands for none. A plan holds what static attributes
# close over, so it lives only while a program was compiled for it or a cached graph refers to it.
_plans = weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[Any, Plan]]()


class _NoStrategy:
    """The key of plans for objects without a strategy."""


_NO_STRATEGY = _NoStrategy()


def _plan(
    objects: Sequence[Any],
    strategy: StrategyLike | None,
    graph: FlatGraph,
    leaves: Sequence[Any],
    structure: jax.tree_util.PyTreeDef,
) -> Plan:
    """Returns the plan of flattened objects, the same one for equal graphs, shapes and rules."""
    shapes = [(x.shape, x.dtype) if hasattr(x, "dtype") else type(x) for x in leaves]
    topology = None if strategy is None else strategy.extended.topology
    key = (structure, tuple(shapes), rules.as_key(), metrics_as_key(), topology)
    known_key, known = graph.last_lookup
    if known_key == key and known.is_for(strategy):
        return known
    plans = _plans.setdefault(
        _NO_STRATEGY if strategy is None else strategy, weakref.WeakValueDictionary()
    )
    try:
        plan = plans.get((graph.key, *key))
    except TypeError:  # from hashing the graph
        require_hashable(objects)
        raise
    if plan is None:
        made = _make_plan(objects, strategy, graph, leaves, structure)
        plan = plans.setdefault((graph.key, *key), made)
    graph.last_lookup = key, plan
    return plan


def _make_plan(
    objects: Sequence[Any],
    strategy: StrategyLike | None,
    graph: FlatGraph,
    leaves: Sequence[Any],
    structure: jax.tree_util.PyTreeDef,
) -> Plan:
    metrics = metrics_in(objects)
    members = {id(v): (i, name) for i, (_, own) in enumerate(metrics) for name, v in own.items()}
    remaining = iter(leaves)
    entries, owners = [], []
    treedefs = structure.children()
    for variable, path, treedef in zip(graph.variables, graph.paths, treedefs, strict=True):
        own = [next(remaining) for _ in range(treedef.num_leaves)]
        name, metric = path_of(objects, path), members.get(id(variable))
        entries.append(make_entry(strategy, variable, name, own, treedef, metric))
        owners += [path[0]] * len(own)
    classes = tuple((type(m), combine_of(m)) for m, _ in metrics)
    own_strategy = None if strategy is None else weakref.ref(strategy)
    return Plan(graph.graphdef, tuple(entries), tuple(owners), classes, own_strategy)


def make_entry(
    strategy: StrategyLike | None,
    variable: nnx.Variable[Any] | jax.Array,
    path: str,
    leaves: Sequence[Any],
    treedef: jax.tree_util.PyTreeDef,
    metric: tuple[int, str] | None,
) -> Entry:
    """Returns the static part of one variable."""
    rule = rules.rule_of(variable)
    layouts = tuple(
        None
        if strategy is None or isinstance(x, PerReplica) or not hasattr(x, "dtype")
        else layout_of(strategy, variable, x.shape, x.dtype)
        for x in leaves
    )
    kind = type(variable).__name__ if isinstance(variable, nnx.Variable) else BARE
    return Entry(path, kind, rule, layouts, treedef, metric)
