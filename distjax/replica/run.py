"""Runs a replica function in a trace: traces, splits and emits it.

The function is traced once, as one replica sees it. The emitter turns the jaxpr into global-view
code in the outer trace and proves which values are equal; mistakes are found in the same jaxpr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distjax import inner_traces, jax_compat, user_mesh
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.expectation import without_expectations
from distjax.context.frames import Frame
from distjax.errors import LocalityError, message
from distjax.placement.per_replica import PerReplica, require_same_topology
from distjax.placement.topology import Topology, renamed_topology
from distjax.replica.body_errors import (
    add_number_note,
    require_no_other_mesh,
    require_own_axis,
)
from distjax.replica.call_checks import require_finished
from distjax.replica.cross_facts import remember
from distjax.replica.emit import JaxprEmitter
from distjax.replica.examine import Given, examine, find_unequal_start, note_lone_updates
from distjax.replica.facts import EQUAL, Fact
from distjax.replica.feedback import Feedback
from distjax.replica.global_value import (
    GlobalValue,
    as_user_value,
    from_user_value,
    from_variable,
    replica_aval,
    to_variable,
)
from distjax.replica.mapped_results import DataFlow, stack_results
from distjax.replica.partitioned_tree import PartitionedTree, is_array
from distjax.replica.reasons import Reasons
from distjax.replica.replica_context import ReplicaContext
from distjax.replica.run_options import AS_RUN, AS_VALUES, RunOptions
from distjax.replica.state_check import check_state
from distjax.replica.static import mark_modules
from distjax.replica.tracer_localities import TracerLocalities
from distjax.replica.user_merge import UserMerge
from distjax.replica.user_names import function_name, positional_names, user_path
from distjax.typing import PyTree
from distjax.variables.conversion import is_number
from distjax.variables.creation_log import CreationLog
from distjax.variables.state import TraceState, variable_p


@dataclasses.dataclass
class ReplicaTrace:
    """A traced replica function.

    Attributes:
      jaxpr, consts: the replica view; its outputs are the array results, then the written
        variables, then the initial values of the created ones.
      result: the pytree of results.
      written: the variables that the function wrote.
      created: the variables that it created.
      merges: the merges that the jaxpr's equations reference weakly.
      error: the exception that the function raised after creating variables, or None; if
        set, the outputs are only the initial values.
    """

    jaxpr: jax_compat.Jaxpr
    consts: list[Any]
    result: PartitionedTree
    written: list[Any]
    created: list[Any]
    merges: list[UserMerge]
    error: BaseException | None


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
    traced = _trace_valid(strategy, fn, given, outer, named)
    if options.axis_name is not None:
        require_own_axis(given.name, traced.jaxpr, named)
    try:
        outs = _emit(named, traced, global_values, outer)
    except BaseException as error:
        if not traced.created:
            raise
        traced = _keep_created(traced, error)
        outs = _emit(named, traced, global_values, outer)
    num_results, num_written = len(traced.result.leaves), len(traced.written)
    results, finals = outs[:num_results], outs[num_results : num_results + num_written]
    _bind_created(traced.created, outs[num_results + num_written :], outer, topology)
    if traced.error is not None:
        raise traced.error
    for variable, value in zip(traced.written, finals, strict=True):
        outer.write(variable, to_variable(variable, value, topology))
    facts = _tell_findings(fn, given, traced, results, finals, outer, named, options)
    pinned = _pin_results(results, topology)
    if options.out_axes is not AS_VALUES:
        flow = DataFlow.of(traced.jaxpr, global_values, named.axis_name)
        return stack_results(given.name, traced.result, pinned, flow, topology, options)
    values = [as_user_value(r, topology) for r in pinned]
    remember(values, facts)
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
        if isinstance(leaf, PerReplica):
            where = f"argument {user_path(path, names)} of {function_name(fn)}"
            require_same_topology(leaf, topology, where)


def _tell_findings(
    fn: Callable[..., Any],
    given: Given,
    traced: ReplicaTrace,
    results: Sequence[GlobalValue],
    finals: Sequence[GlobalValue],
    outer: TraceState,
    topology: Topology,
    options: RunOptions,
) -> list[Fact]:
    """Reports mistakes, tells the observer what is proved; returns a fact per result, or none."""
    env: dict[Any, Any] = {}
    own = results
    if options.returns_object_state:
        own = results[: sum(path.startswith("[0]") for path in traced.result.paths)]
    if topology.num_replicas > 1:
        env = examine(
            traced.jaxpr, traced.written, given, topology, own=len(own), results=len(results)
        )
    observer = frames.observer()
    if observer is not None:
        outs = _proofs(traced.result.paths, results)
        named = [*traced.result.paths, *(f"variable {v.name!r}" for v in traced.written)]
        reasons = Reasons(traced.jaxpr, env, topology.axis_name, given.paths)
        ends = zip(named, traced.jaxpr.outvars, (*results, *finals), strict=False)
        why = [(name, x.varying, reasons.explain(atom, x.varying)) for name, atom, x in ends]
        observer.on_run(topology, given.name, _proofs(given.paths, given.values), outs, why)
    outvars = traced.jaxpr.outvars[: len(results)] if topology.num_replicas > 1 else []
    facts = [EQUAL if isinstance(v, jax_compat.Literal) else env[v] for v in outvars]
    if topology.num_replicas > 1 and options.out_axes is AS_VALUES:
        inputs = [env[v] for v in traced.jaxpr.invars]
        if not check_state(fn, given, traced.result, results, (inputs, facts), outer.expectations):
            paths = traced.result.paths[: len(own)]
            if own is not results:
                paths = [path.removeprefix("[0]") for path in paths]
            note_lone_updates(facts[: len(own)], paths, own, given, outer.expectations)
    return facts


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


# -- tracing ------------------------------------------------------------------


def _trace_valid(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    given: Given,
    outer: TraceState,
    topology: Topology,
) -> ReplicaTrace:
    """Traces ``fn``; raises if it does what a replica cannot do."""
    try:
        traced = trace_replica(strategy, fn, given.partitioned, given.values, outer, topology)
    except (TypeError, jax.errors.JAXTypeError) as error:
        add_number_note(error, fn, given.partitioned, given.names)
        raise
    require_no_other_mesh(given.name, traced.jaxpr, topology)
    return traced


def trace_replica(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    partitioned: PartitionedTree,
    global_values: Sequence[GlobalValue],
    outer: TraceState,
    topology: Topology,
) -> ReplicaTrace:
    """Traces ``fn`` once, as one replica sees it, with the axis name of `topology`."""
    found: dict[str, Any] = {}

    def traced(*local: jax.Array) -> list[Any]:
        creation = CreationLog.within(outer)
        state = TraceState(local_view=True, creations=creation)
        args, kwargs = partitioned.combine(local)
        localities = TracerLocalities(
            topology.axis_name, state.trace, local, [x.varying for x in global_values]
        )
        context = ReplicaContext(strategy, localities)
        error, written = None, []
        try:
            frame = Frame(strategy, context, state, axis_name=topology.axis_name)
            with frames.with_frame(frame):
                result = PartitionedTree(require_finished(fn(*args, **kwargs), fn), is_array)
            if context.merge_error is not None:
                raise context.merge_error
            leaves = [_refuse_per_replica(leaf, fn) for leaf in result.take_leaves()]
            written = list(state.written)
        except BaseException as raised:
            if creation is None or not creation.values:
                raise
            error, result, leaves = raised, PartitionedTree((), is_array), []
        finally:
            localities.forget()
        created = list(creation.values) if creation is not None else []
        found.update(result=result, written=written, created=created, error=error)
        found["merges"], context.merges = context.merges, []
        inits = creation.take_values() if creation is not None else []
        return [*leaves, *(state.read(v) for v in written), *inits]

    _name_after(traced, fn)
    avals = [replica_aval(x) for x in global_values]
    axis_env = [(topology.axis_name, topology.num_replicas)]
    try:
        with _model_axes_in_scope(topology):
            jaxpr, consts = inner_traces.trace_jaxpr(traced, avals, axis_env)
    except AssertionError as error:
        if not str(error).startswith("ManualAxisType"):
            raise
        with _replica_axis_in_scope(topology):  # in which lax.pcast is the identity
            jaxpr, consts = inner_traces.trace_jaxpr(traced, avals, axis_env)
    trace = ReplicaTrace(jaxpr, consts, **found)
    return trace if trace.error is None else _keep_created(trace, trace.error)


def _keep_created(trace: ReplicaTrace, error: BaseException) -> ReplicaTrace:
    """Reduces the trace of a failed function to the creation of its variables.

    The user may hold these variables behind a guard that prevents creating them again.
    """
    initial = trace.jaxpr.outvars[len(trace.jaxpr.outvars) - len(trace.created) :]
    return dataclasses.replace(
        trace,
        jaxpr=jax_compat.needed_for(trace.jaxpr, initial),
        result=PartitionedTree((), is_array),
        written=[],
        error=error,
    )


def _name_after(traced: Any, fn: Callable[..., Any]) -> None:
    """Makes JAX's errors name the user's function, and its leaves by number."""
    traced.__wrapped__ = fn
    traced.__signature__ = inspect.signature(lambda *leaves: None)


def _model_axes_in_scope(topology: Topology) -> Any:
    """Returns a context in which sharding constraints may name the model axes."""
    if topology.mesh is None or not topology.model_axes:
        return contextlib.nullcontext()
    return user_mesh.manual_axis(topology.mesh, topology.axis_name)


def _replica_axis_in_scope(topology: Topology) -> Any:
    """Returns a context in which `lax.pcast` may name the replica axis.

    Not used for every trace, as arrays closed over would then have to be on this mesh.
    """
    if topology.mesh is not None:
        return user_mesh.manual_axis(topology.mesh, topology.axis_name)
    manual = (jax.sharding.AxisType.Manual,)
    sizes, names = (topology.num_replicas,), (topology.axis_name,)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, names, manual))


def _bind_created(
    created: Sequence[Any], values: Sequence[GlobalValue], outer: TraceState, topology: Topology
) -> None:
    """Registers created variables with the outer trace, with replica 0's values."""
    for variable, value in zip(created, values, strict=True):
        if value.varying and topology.num_replicas > 1:
            find_unequal_start(variable)
        first = value.array[0] if value.varying else value.array
        outer.creations.collect(variable, first)  # pyright: ignore[reportOptionalMemberAccess]
        outer.bind(variable, jnp.broadcast_to(first, variable.global_shape))


def _refuse_per_replica(leaf: PyTree, fn: Callable[..., Any]) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    raise LocalityError(
        message(
            f"{function_name(fn)} needs to return values of one replica",
            got=f"a PerReplica of {leaf.num_replicas} values that it closes over",
            why="inside a replica function a value is that replica's own",
            fix="pass it as an argument: strategy.run(fn, args=(x,))",
        )
    )


def _emit(
    topology: Topology, traced: ReplicaTrace, args: Sequence[GlobalValue], outer: TraceState
) -> list[Any]:
    known = {}
    for eqn in traced.jaxpr.eqns:
        if eqn.primitive is variable_p:
            variable = eqn.params["variable"]()
            known[eqn.outvars[0]] = from_variable(variable, outer.read(variable))
    return JaxprEmitter(topology).emit(traced.jaxpr, traced.consts, args, known)
