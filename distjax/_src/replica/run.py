"""Runs a replica function in a trace: traces, splits and emits it.

The function is traced once, as one replica sees it. The emitter turns the jaxpr into global-view
code in the outer trace and proves which values are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distjax._src import hooks
from distjax._src.context.contracts import StrategyLike
from distjax._src.context.expectation import without_expectations
from distjax._src.placement.per_replica import PerReplica, require_same_topology
from distjax._src.placement.rows import require_not_split
from distjax._src.placement.topology import Topology
from distjax._src.replica.arguments import (
    PartitionedTree,
    function_name,
    is_array,
    is_object_state,
    mark_modules,
    positional_names,
    user_path,
)
from distjax._src.replica.emit import JaxprEmitter
from distjax._src.replica.global_value import (
    GlobalValue,
    as_user_value,
    from_user_value,
    from_variable,
    to_variable,
)
from distjax._src.replica.trace import (
    ReplicaTrace,
    add_notes,
    keep_created,
    require_no_other_mesh,
    require_own_axis,
    trace_replica,
)
from distjax._src.variables.conversion import is_number
from distjax._src.variables.state import TraceState, find_variables


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


class TracedRun(NamedTuple):
    """A replica function that has been traced and emitted.

    Attributes:
      fn: the function.
      given: its arguments.
      traced: its trace.
      topology: its replicas.
      results: its array results, in the global view.
      values: the same as the user gets them.
      finals: the last values of the variables that it writes, in the global view.
      unequal: the variables that it creates with an initial value that differs.
      num_own: how many of the results are the user's; the others are state of objects.
      is_first_of_several: whether the user's results are the first of a tuple of trees.
      expectations: by `id`, each array that `dj.expect` allows to come back different, and why.
    """

    fn: Callable[..., Any]
    given: Given
    traced: ReplicaTrace
    topology: Topology
    results: Sequence[GlobalValue]
    values: Sequence[Any]
    finals: Sequence[GlobalValue]
    unequal: Sequence[Any]
    num_own: int
    is_first_of_several: bool
    expectations: Mapping[int, tuple[Any, str]]


def run_in_trace(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outer: TraceState,
    *,
    returns_object_state: bool = False,
) -> Any:
    """Emits ``fn`` on every replica into the current trace.

    Args:
      strategy: the strategy whose replicas run.
      fn: the replica function.
      args: positional arguments, in the global view.
      kwargs: keyword arguments.
      outer: the variable state around the call.
      returns_object_state: whether the user's results are the first of a tuple of trees. The
        others are state of objects, which rules later turn into single values.

    Returns:
      The results in the global view: arrays if proved equal, else PerReplica; Python
      objects and variables unchanged.
    """
    topology = strategy.extended.topology
    names = positional_names(fn)
    told = hooks.tell(hooks.on_call, outer.memory, fn, (function_name(fn), names), args, kwargs)
    args, kwargs = without_expectations(args, kwargs, outer.expectations)
    partitioned = PartitionedTree(
        mark_modules((args, kwargs), tuple(names)), lambda leaf: is_array(leaf) or is_number(leaf)
    )
    _require_same_replicas(fn, partitioned, names, topology)
    global_values = list(map(from_user_value, partitioned.leaves))
    given = Given(function_name(fn), partitioned, names, global_values)
    try:
        traced = trace_replica(strategy, fn, partitioned, global_values, outer, topology)
    except Exception as error:
        add_notes(error, given.name, given.paths, partitioned.leaves, topology.num_replicas)
        raise
    require_no_other_mesh(given.name, traced.jaxpr, topology)
    for captured in traced.consts:
        require_not_split(captured, topology, f"an array that {given.name} captures")
    require_own_axis(given.name, traced.jaxpr, topology)
    try:
        outs = _emit(topology, traced, global_values, outer)
    except BaseException as error:
        if not traced.created:
            raise
        traced = keep_created(traced, error)
        outs = _emit(topology, traced, global_values, outer)
    num_results, num_written = len(traced.result.leaves), len(traced.written)
    results, finals = outs[:num_results], outs[num_results : num_results + num_written]
    unequal = _bind_created(traced.created, outs[num_results + num_written :], outer)
    if traced.error is not None:
        raise traced.error
    for variable, value in zip(traced.written, finals, strict=True):
        outer.write(variable, to_variable(variable, value, topology))
    pinned = _pin_results(results, topology)
    values = [as_user_value(r, topology) for r in pinned]
    is_several = returns_object_state
    num_own = sum(path.startswith("[0]") or not is_several for path in traced.result.paths)
    run = TracedRun(
        fn,
        given,
        traced,
        topology,
        results,
        values,
        finals,
        unequal,
        num_own,
        is_several,
        outer.expectations,
    )
    hooks.tell(hooks.on_traced, run)
    result = traced.result.combine(values)
    for after_call in told:
        after_call(result, {})
    return result


def _require_same_replicas(
    fn: Callable[..., Any], partitioned: PartitionedTree, names: Sequence[str], topology: Topology
) -> None:
    for leaf, path in zip(partitioned.leaves, partitioned.paths, strict=True):
        where = f"argument {user_path(path, names)} of {function_name(fn)}"
        if isinstance(leaf, PerReplica):
            require_same_topology(leaf, topology, where)
        elif not is_object_state(path):
            require_not_split(leaf, topology, where)


def _pin_results(results: list[GlobalValue], topology: Topology) -> list[GlobalValue]:
    """Constrains `results` to the strategy's device if it has no mesh.

    Otherwise, if all arguments are uncommitted, `jit` would pick the default device.
    """
    if topology.mesh is not None:
        return results
    arrays = jax.lax.with_sharding_constraint([r.array for r in results], topology.mirrored)
    return [GlobalValue(a, r.varying) for a, r in zip(arrays, results, strict=True)]


def _bind_created(
    created: Sequence[Any], values: Sequence[GlobalValue], outer: TraceState
) -> list[Any]:
    """Registers created variables with the outer trace, with replica 0's values.

    Returns:
      Those whose values differ.
    """
    for variable, value in zip(created, values, strict=True):
        first = value.array[0] if value.varying else value.array
        outer.creations.collect(variable, first)  # pyright: ignore[reportOptionalMemberAccess]
        outer.bind(variable, jnp.broadcast_to(first, variable.global_shape))
    return [v for v, value in zip(created, values, strict=True) if value.varying]


def _emit(
    topology: Topology, traced: ReplicaTrace, args: Sequence[GlobalValue], outer: TraceState
) -> list[Any]:
    read = find_variables(traced.jaxpr)
    known = {name: from_variable(variable, outer.read(variable)) for name, variable in read.items()}
    emitter = next(iter(hooks.tell(hooks.emitters, topology)), None) or JaxprEmitter(topology)
    return emitter.emit(traced.jaxpr, traced.consts, args, known)
