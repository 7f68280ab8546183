"""Runs a replica function in a trace: traces, splits and emits it.

The function is traced once, as one replica sees it. The emitter turns the jaxpr into global-view
code in the outer trace and proves which values are equal; mistakes are found in the same jaxpr.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.expectation import without_expectations
from distjax.placement.per_replica import PerReplica, require_same_topology
from distjax.placement.rows import require_not_split
from distjax.placement.topology import Topology, renamed_topology
from distjax.replica.body_errors import (
    add_captured_note,
    add_keys_note,
    add_value_note,
    require_no_other_mesh,
    require_own_axis,
)
from distjax.replica.cross_facts import remember, remember_own
from distjax.replica.emit import JaxprEmitter
from distjax.replica.examine import (
    Given,
    as_if_several,
    examine,
    find_unequal_start,
    report_lone_updates,
)
from distjax.replica.facts import EQUAL, Fact
from distjax.replica.feedback import Feedback
from distjax.replica.global_value import (
    GlobalValue,
    as_user_value,
    from_user_value,
    from_variable,
    to_variable,
)
from distjax.replica.mapped_results import DataFlow, stack_results
from distjax.replica.partitioned_tree import PartitionedTree, is_array, is_object_state
from distjax.replica.reasons import Reasons
from distjax.replica.replica_trace import ReplicaTrace, keep_created, trace_replica
from distjax.replica.run_options import AS_RUN, AS_VALUES, RunOptions
from distjax.replica.state_check import check_state
from distjax.replica.static import mark_modules
from distjax.replica.user_names import function_name, positional_names, user_path
from distjax.variables.conversion import is_number
from distjax.variables.state import TraceState, find_variables


class _Emitted(NamedTuple):
    """A call of a replica function: its arguments, its trace, and what that was emitted to.

    Attributes:
      given: the arguments.
      traced: the trace.
      results: its array results, in the global view.
      finals: the last values of the variables that it writes, in the global view.
    """

    given: Given
    traced: ReplicaTrace
    results: Sequence[GlobalValue]
    finals: Sequence[GlobalValue]


def run_in_trace(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outer: TraceState,
    options: RunOptions = AS_RUN,
) -> Any:
    """Emits ``fn`` on every replica into the current trace.

    Args:
      strategy: the strategy whose replicas run.
      fn: the replica function.
      args: positional arguments, in the global view.
      kwargs: keyword arguments.
      outer: the variable state around the call.
      options: how this call departs from `run`.

    Returns:
      The results in the global view: arrays if proved equal, else PerReplica; Python
      objects and variables unchanged. Or as specified by `options`.
    """
    topology = strategy.extended.topology
    named = renamed_topology(topology, options.axis_name or topology.axis_name)
    names = positional_names(fn)
    feedback = _compare_feedback(fn, names, args, kwargs, outer)
    args, kwargs = without_expectations(args, kwargs, outer.expectations)
    partitioned = PartitionedTree(
        mark_modules((args, kwargs), tuple(names)), lambda leaf: is_array(leaf) or is_number(leaf)
    )
    _require_same_replicas(fn, partitioned, names, topology)
    global_values = list(map(from_user_value, partitioned.leaves))
    given = Given(function_name(fn), partitioned, names, global_values)
    traced = _trace_valid(strategy, fn, given, outer, named, options)
    if options.axis_name is not None:
        require_own_axis(given.name, traced.jaxpr, named)
    try:
        outs = _emit(named, traced, global_values, outer)
    except BaseException as error:
        if not traced.created:
            raise
        traced = keep_created(traced, error)
        outs = _emit(named, traced, global_values, outer)
    num_results, num_written = len(traced.result.leaves), len(traced.written)
    results, finals = outs[:num_results], outs[num_results : num_results + num_written]
    _bind_created(traced.created, outs[num_results + num_written :], outer, topology)
    if traced.error is not None:
        raise traced.error
    for variable, value in zip(traced.written, finals, strict=True):
        outer.write(variable, to_variable(variable, value, topology))
    facts = _tell_findings(fn, _Emitted(given, traced, results, finals), outer, named, options)
    pinned = _pin_results(results, topology)
    if options.out_axes is not AS_VALUES:
        flow = DataFlow(traced.jaxpr, global_values, named.axis_name)
        return stack_results(given.name, traced.result, pinned, flow, topology, options)
    values = [as_user_value(r, topology) for r in pinned]
    _remember_results(values, facts, topology)
    result = traced.result.combine(values)
    feedback.remember(result)
    return result


def _compare_feedback(
    fn: Callable[..., Any],
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outer: TraceState,
) -> Feedback:
    """Returns the function's Feedback in the outer trace; compares a second call."""
    _, feedback = outer.feedbacks.get(id(fn), (fn, None))
    if feedback is not None:
        feedback.compare(args, kwargs)
        return feedback
    feedback = Feedback(function_name(fn), names, args, kwargs)
    outer.feedbacks[id(fn)] = fn, feedback
    return feedback


def _require_same_replicas(
    fn: Callable[..., Any], partitioned: PartitionedTree, names: Sequence[str], topology: Topology
) -> None:
    for leaf, path in zip(partitioned.leaves, partitioned.paths, strict=True):
        where = f"argument {user_path(path, names)} of {function_name(fn)}"
        if isinstance(leaf, PerReplica):
            require_same_topology(leaf, topology, where)
        elif not is_object_state(path):
            require_not_split(leaf, topology, where)


def _tell_findings(
    fn: Callable[..., Any],
    emitted: _Emitted,
    outer: TraceState,
    topology: Topology,
    options: RunOptions,
) -> list[Fact]:
    """Reports mistakes, tells the observer what is proved; returns a fact per result, or none."""
    given, traced, results, _ = emitted
    is_alone = topology.num_replicas == 1
    own = results
    if options.returns_object_state:
        own = results[: sum(path.startswith("[0]") for path in traced.result.paths)]
    env = examine(traced.jaxpr, traced.written, given, topology, own=len(own), results=len(results))
    _tell_observer(emitted, {} if is_alone else env, topology)
    outvars = traced.jaxpr.outvars[: len(results)]
    facts = [EQUAL if isinstance(v, jax_compat.Literal) else env[v] for v in outvars]
    inputs = [env[v] for v in traced.jaxpr.invars]
    if is_alone:
        given = given._replace(values=as_if_several(given.values, inputs))
        results = as_if_several(results, facts)
        own = results[: len(own)]
    if options.out_axes is AS_VALUES:
        known, meant = (inputs, facts), outer.expectations
        if not check_state(fn, given, traced.result, results, known, meant, is_alone=is_alone):
            paths = traced.result.paths[: len(own)]
            if own is not results:
                paths = [path.removeprefix("[0]") for path in paths]
            report_lone_updates(facts[: len(own)], paths, own, given, meant)
    return facts


def _remember_results(values: Sequence[Any], facts: Sequence[Fact], topology: Topology) -> None:
    """Remembers facts about results; of a single replica, which would differ if there were more."""
    remember(values, facts)
    if topology.num_replicas == 1:
        pairs = zip(values, facts, strict=True)
        remember_own([v for v, fact in pairs if fact.differs and fact.find("base")])


def _tell_observer(emitted: _Emitted, env: dict[Any, Any], topology: Topology) -> None:
    """Tells an observer which arguments, results and variables are proved equal, and why."""
    observer = frames.observer()
    if observer is None:
        return
    given, traced, results, finals = emitted
    named = [*traced.result.paths, *(f"variable {v.name!r}" for v in traced.written)]
    reasons = Reasons(traced.jaxpr, env, topology.axis_name, given.paths)
    outs = zip(named, traced.jaxpr.outvars, (*results, *finals), strict=False)
    why = [(name, x.varying, reasons.explain(atom, x.varying)) for name, atom, x in outs]
    proved = _proofs(given.paths, given.values), _proofs(traced.result.paths, results)
    observer.on_run(topology, given.name, *proved, why)


def _proofs(paths: Sequence[str], values: Sequence[GlobalValue]) -> list[tuple[str, bool]]:
    return [(path, value.varying) for path, value in zip(paths, values, strict=True)]


def _pin_results(results: list[GlobalValue], topology: Topology) -> list[GlobalValue]:
    """Constrains `results` to the strategy's device if it has no mesh.

    Otherwise, if all arguments are uncommitted, `jit` would pick the default device.
    """
    if topology.mesh is not None:
        return results
    arrays = jax.lax.with_sharding_constraint([r.array for r in results], topology.mirrored)
    return [GlobalValue(a, r.varying) for a, r in zip(arrays, results, strict=True)]


def _trace_valid(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    given: Given,
    outer: TraceState,
    topology: Topology,
    options: RunOptions,
) -> ReplicaTrace:
    """Traces ``fn``; raises if it does what a replica cannot do."""
    try:
        traced = trace_replica(strategy, fn, given.partitioned, given.values, outer, topology)
    except (AttributeError, TypeError, jax.errors.JAXTypeError) as error:
        is_pmap = options.out_axes is not AS_VALUES
        add_captured_note(error, given.name)
        add_value_note(error, given.name, given.paths, given.partitioned.leaves, is_pmap=is_pmap)
        raise
    except ValueError as error:
        arguments = given.name, given.paths, given.partitioned.leaves
        add_keys_note(error, *arguments, topology.num_replicas)
        raise
    require_no_other_mesh(given.name, traced.jaxpr, topology)
    for captured in traced.consts:
        require_not_split(captured, topology, f"an array that {given.name} captures")
    return traced


def _bind_created(
    created: Sequence[Any], values: Sequence[GlobalValue], outer: TraceState, topology: Topology
) -> None:
    """Registers created variables with the outer trace, with replica 0's values."""
    for variable, value in zip(created, values, strict=True):
        if value.varying:
            find_unequal_start(variable)
        first = value.array[0] if value.varying else value.array
        outer.creations.collect(variable, first)  # pyright: ignore[reportOptionalMemberAccess]
        outer.bind(variable, jnp.broadcast_to(first, variable.global_shape))


def _emit(
    topology: Topology, traced: ReplicaTrace, args: Sequence[GlobalValue], outer: TraceState
) -> list[Any]:
    read = find_variables(traced.jaxpr)
    known = {name: from_variable(variable, outer.read(variable)) for name, variable in read.items()}
    return JaxprEmitter(topology).emit(traced.jaxpr, traced.consts, args, known)
