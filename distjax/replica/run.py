"""Running a replica function in a trace: trace it, cut it, hand out results."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.context import frames
from distjax.context.frames import Frame
from distjax.errors import LocalityError, explain
from distjax.placement.per_replica import PerReplica, require_same_topology
from distjax.replica.arguments import (
    Template,
    argument_names,
    function_name,
    is_array,
    user_path,
)
from distjax.replica.context import ReplicaContext
from distjax.replica.cut import Cutter
from distjax.replica.located import Located, as_user_value, replica_aval
from distjax.replica.state_check import check_state
from distjax.replica.user_merge import UserMerge
from distjax.replica.views import global_view, replica_view
from distjax.variables.conversion import is_number
from distjax.variables.creation import Creation
from distjax.variables.state import TraceState, variable_p


@dataclasses.dataclass
class ReplicaTrace:
    """A traced replica function.

    Attributes:
      jaxpr, consts: the replica view; outputs are the array results, then the
        written variables, then the initial values of created ones.
      result: the tree of results.
      written: variables that the function wrote.
      created: variables that it created.
      merges: those that the jaxpr's equations hold weakly.
    """

    jaxpr: Any
    consts: list[Any]
    result: Template
    written: list[Any]
    created: list[Any]
    merges: list[UserMerge]


def run_in_trace(
    strategy: Any, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], outer: Any
) -> Any:
    """Emits ``fn`` on every replica into the current trace.

    Args:
      strategy: whose replicas run.
      fn: the replica function.
      args: positional arguments, in the global view.
      kwargs: keyword arguments.
      outer: the state of variables around the call.

    Returns:
      The results in the global view: arrays where proved equal, PerReplica
      where not, Python objects and variables as they are.
    """
    topology = strategy.extended.topology
    template = Template((args, kwargs), lambda leaf: is_array(leaf) or is_number(leaf))
    names = argument_names(fn, len(args))
    for leaf, path in zip(template.leaves, template.paths, strict=True):
        if isinstance(leaf, PerReplica):
            where = f"argument {user_path(path, names)} of {function_name(fn)}"
            require_same_topology(leaf, topology, where)
    located = [_as_located(leaf) for leaf in template.leaves]
    traced = trace_replica(strategy, fn, template, located, outer)
    outs = _emit(topology, traced, located, outer)
    num_results, num_written = len(traced.result.leaves), len(traced.written)
    results, finals = outs[:num_results], outs[num_results : num_results + num_written]
    for variable, value in zip(traced.created, outs[num_results + num_written :], strict=True):
        first = value.array[0] if value.differs else value.array
        outer.creations.collect(variable, first)
        outer.bind(variable, jnp.broadcast_to(first, variable.global_shape))
    for variable, value in zip(traced.written, finals, strict=True):
        outer.write(variable, global_view(variable, value, topology))
    observer = frames.observer()
    if observer is not None:
        ins = _proofs([user_path(path, names) for path in template.paths], located)
        outs = _proofs(traced.result.paths, results)
        observer.saw_run(topology, function_name(fn), ins, outs)
    if topology.num_replicas > 1:
        check_state(fn, names, template, located, traced.result, results)
    return traced.result.fill([as_user_value(r, topology) for r in _pinned(results, topology)])


def _proofs(paths: Sequence[str], values: Sequence[Located]) -> list[tuple[str, bool]]:
    return [(path, value.differs) for path, value in zip(paths, values, strict=True)]


def _pinned(results: list[Located], topology: Any) -> list[Located]:
    """Returns `results` on the strategy's device, where the program does not say it itself.

    Without a mesh and with uncommitted arguments only, `jit` would take the default device.
    """
    if topology.mesh is not None:
        return results
    arrays = jax.lax.with_sharding_constraint([r.array for r in results], topology.mirrored)
    return [Located(a, r.differs) for a, r in zip(arrays, results, strict=True)]


def _as_located(leaf: Any) -> Located:
    if isinstance(leaf, PerReplica):
        return Located(leaf.stacked, True)
    return Located(jnp.asarray(leaf), False)


# -- tracing ------------------------------------------------------------------


def trace_replica(
    strategy: Any,
    fn: Callable[..., Any],
    template: Template,
    located: Sequence[Located],
    outer: Any,
) -> ReplicaTrace:
    """Traces ``fn`` once, as one replica sees it."""
    topology = strategy.extended.topology
    found: dict[str, Any] = {}

    def traced(*local: Any) -> list[Any]:
        creation = Creation.within(outer)
        state = TraceState(local_view=True, creations=creation)
        args, kwargs = template.fill(local)
        context = ReplicaContext(strategy)
        with frames.entered(Frame(strategy, context, state)):
            result = Template(fn(*args, **kwargs), is_array)
        if context.merge_error is not None:
            raise context.merge_error
        leaves = [_refuse_per_replica(leaf, fn) for leaf in result.release()]
        created = list(creation.values) if creation is not None else []
        found.update(result=result, written=list(state.written), created=created)
        found["merges"], context.merges = context.merges, []
        inits = list(creation.values.values()) if creation is not None else []
        return [*leaves, *(state.read(v) for v in state.written), *inits]

    _name_after(traced, fn)
    avals = [replica_aval(x) for x in located]
    axis_env = [(topology.axis_name, topology.num_replicas)]
    with _model_axes_in_scope(topology):
        jaxpr, consts = jax_compat.trace_jaxpr(traced, avals, axis_env)
    return ReplicaTrace(jaxpr, consts, **found)


def _name_after(traced: Any, fn: Any) -> None:
    """Lets JAX's errors name the user's function, and its leaves by their number."""
    traced.__wrapped__ = fn
    traced.__signature__ = inspect.signature(lambda *leaves: None)


def _model_axes_in_scope(topology: Any) -> Any:
    """Returns a context in which sharding constraints may name the model axes."""
    if not topology.model_axes:
        return contextlib.nullcontext()
    return jax_compat.manual_axis(topology.mesh, topology.axis_name)


def _refuse_per_replica(leaf: Any, fn: Any) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    raise LocalityError(
        explain(
            f"{function_name(fn)} needs to return values of one replica",
            got=f"a PerReplica of {leaf.num_replicas} values that it closes over",
            why="inside a replica function a value is that replica's own",
            fix="pass it as an argument: strategy.run(fn, args=(x,))",
        )
    )


def _emit(topology: Any, traced: ReplicaTrace, args: Sequence[Located], outer: Any) -> list[Any]:
    known = {}
    for eqn in traced.jaxpr.eqns:
        if eqn.primitive is variable_p:
            variable = eqn.params["variable"]()
            known[eqn.outvars[0]] = replica_view(variable, outer.read(variable))
    return Cutter(topology).emit(traced.jaxpr, traced.consts, args, known)
