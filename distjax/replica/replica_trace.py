"""The trace of a replica function: what it does, as one replica sees it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax import inner_traces, jax_compat, user_mesh
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame
from distjax.errors import LocalityError, message
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.replica.call_checks import require_finished
from distjax.replica.global_value import GlobalValue, replica_aval
from distjax.replica.merge import UserMerge
from distjax.replica.partitioned_tree import PartitionedTree, is_array
from distjax.replica.replica_context import ReplicaContext
from distjax.replica.user_names import function_name
from distjax.typing import PyTree
from distjax.variables.creation_log import CreationLog
from distjax.variables.state import TraceState


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
        context = ReplicaContext(strategy)
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
    return trace if trace.error is None else keep_created(trace, trace.error)


def keep_created(trace: ReplicaTrace, error: BaseException) -> ReplicaTrace:
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
