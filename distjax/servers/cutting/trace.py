"""cut_step: from the user's replica function to a plan, once per function and signature."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from distjax import jax_compat, user_mesh
from distjax.context import frames
from distjax.context.expectation import without_expectations
from distjax.errors import ContextError, StrategyMismatchError, message
from distjax.objects.object_arguments import ObjectArguments
from distjax.objects.outer_state import checking_outer_state
from distjax.objects.reached import Reached
from distjax.objects.stateful_args import has_objects
from distjax.placement.per_replica import PerReplica, require_same_topology
from distjax.program.discovery import signature_of
from distjax.replica.call_checks import require_call
from distjax.replica.examine import Given, examine
from distjax.replica.global_value import GlobalValue
from distjax.replica.partitioned_tree import PartitionedTree, is_array, mark_static
from distjax.replica.replica_trace import trace_replica
from distjax.replica.static import mark_modules
from distjax.replica.user_names import function_name, positional_names, user_path
from distjax.servers.cutting.assembly import assemble_plan
from distjax.servers.extended import ServedStrategy
from distjax.servers.plan import Cuts, Plan
from distjax.typing import ArrayLike, DTypeLike, PyTree
from distjax.variables.conversion import is_number
from distjax.variables.state import TraceState


def cut_step(
    strategy: ServedStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree] = (),
    kwargs: dict[str, PyTree] | None = None,
) -> tuple[Plan, list[jax.Array | np.ndarray]]:
    """Returns the plan of a replica function, and its flat arguments.

    Traced and cut once per function and signature; nothing is run.

    Args:
      strategy: whose workers and servers run it.
      fn: the replica function.
      args: its positional arguments.
      kwargs: its keyword arguments.

    Raises:
      ValueError, TypeError: args or kwargs have the wrong type, or fn is not a function.
      MergeError: a merge is in a loop, or an update needs variables of several servers.
      StrategyMismatchError: fn uses variables of another strategy.
      Whatever ``fn`` raises.
    """
    given, named = require_call(fn, args, kwargs, "schedule")
    cuts: Cuts = strategy.extended.cuts.get(fn)
    if cuts.plans:
        cuts.confirm_reused()
    if not cuts.reached.is_the_same():
        cuts.forget()
    leaves, treedef = jax.tree.flatten((given, named))
    kinds = tuple(map(_kind_of, leaves))
    key = treedef, kinds, jax_compat.trace_context()
    found = cuts.by_kinds.get(key)
    if found is None:
        plan, flat = _look_up(strategy, fn, given, named, cuts)
        if len(flat) == len(leaves) and None not in kinds:
            cuts.by_kinds[key] = plan, tuple(x.dtype for x in flat)
        return plan, flat
    plan, dtypes = found
    return plan, [_as_flat(x, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]


def _kind_of(leaf: object) -> Hashable:
    """Returns what a trace depends on in an argument; None if it may depend on more than that."""
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype
    return type(leaf) if type(leaf) in (bool, int, float, complex) else None


def _as_flat(leaf: ArrayLike, dtype: DTypeLike) -> jax.Array | np.ndarray:
    """Returns an argument as an array of the dtype that the trace was made for."""
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype)


def _look_up(
    strategy: ServedStrategy,
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    cuts: Cuts,
) -> tuple[Plan, list[jax.Array | np.ndarray]]:
    """Returns the plan for any arguments, cut now if it is new, and the flat arguments."""
    if not cuts.plans:  # at the first call only, as in other strategies
        _require_no_objects(fn, args, kwargs)
    names = positional_names(fn)
    marked = mark_modules((args, kwargs), tuple(names))
    tree = mark_static(without_expectations(*marked), names)
    key = signature_of(tree), jax_compat.trace_context()
    with strategy.extended.tracing:
        plan = cuts.plans.get(key)
        if plan is None:
            plan = cuts.plans[key] = _cut(strategy, fn, *tree, reached=cuts.reached)
    return plan, [_as_flat(x, jax_compat.aval_of(x).dtype) for x in jax.tree.leaves(tree)]


@user_mesh.ignores_user_mesh
def _cut(
    strategy: ServedStrategy,
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    reached: Reached,
) -> Plan:
    """Traces a step and cuts it; records what it reached."""
    _require_outside_traces(fn)
    partitioned = PartitionedTree((args, kwargs), lambda leaf: is_array(leaf) or is_number(leaf))
    names = positional_names(fn)
    values = _values_of(strategy, fn, partitioned, names)
    outer = TraceState(local_view=False)  # no log of creations: variables are made outside of steps
    topology = strategy.extended.topology
    objects = ObjectArguments((args, kwargs), names)
    with checking_outer_state(fn):
        traced = trace_replica(strategy, fn, partitioned, values, outer, topology)
    reached.record([fn, *objects.values], [*outer.read_order, *traced.written])
    objects.require_no_leaks(function_name(fn), traced.result.objects)
    objects.require_inputs(traced.jaxpr, traced.consts)
    if topology.num_replicas > 1:
        given = Given(function_name(fn), partitioned, names, values)
        count = len(traced.result.leaves)
        examine(traced.jaxpr, traced.written, given, topology, own=count, results=count)
    varying = [value.varying for value in values]
    paths = tuple(user_path(path, names) for path in partitioned.paths)
    return assemble_plan(function_name(fn), traced, varying, paths, strategy.extended)


def _values_of(
    strategy: ServedStrategy,
    fn: Callable[..., Any],
    partitioned: PartitionedTree,
    names: Sequence[str],
) -> list[GlobalValue]:
    """Returns the arguments, each marked as varying per replica or not."""
    values: list[GlobalValue] = []
    for leaf, path in zip(partitioned.leaves, partitioned.paths, strict=True):
        is_varying = isinstance(leaf, PerReplica)
        if is_varying:
            _require_own_replicas(strategy, fn, leaf, user_path(path, names))
        values.append(GlobalValue(leaf.stacked if is_varying else leaf, is_varying))
    return values


def _require_outside_traces(fn: Callable[..., Any]) -> None:
    if not jax_compat.tracing():
        return
    raise ContextError(
        message(
            f"{function_name(fn)} needs to be scheduled outside of traces",
            got=f"a call inside a trace, in {frames.current().name}",
            why="workers and servers run it by themselves, in several programs",
            fix="call it from ordinary code; a function under dj.jit can call it as it is",
        )
    )


def _require_no_objects(
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> None:
    if not has_objects(fn, args, kwargs):
        return
    raise StrategyMismatchError(
        message(
            f"{function_name(fn)} needs parameters that are variables at the servers",
            got="a Flax module, optimizer or Rngs among its arguments, or captured by it",
            why="their arrays are in this process, and no server knows them",
            fix="under strategy.scope(): graphdef, params = nnx.split(model); variables = "
            "jax.tree.map(dj.Variable, params); in the step nnx.merge(graphdef, values)",
        )
    )


def _require_own_replicas(
    strategy: ServedStrategy, fn: Callable[..., Any], value: PerReplica, path: str
) -> None:
    topology = strategy.extended.topology
    if topology.num_replicas > 1:
        require_same_topology(value, topology, f"argument {path} of {function_name(fn)}")
        return
    raise StrategyMismatchError(
        message(
            f"{function_name(fn)} needs one value per argument",
            got="a PerReplica, of another strategy",
            why="a worker has one replica, and each closure one worker",
            fix="schedule a closure for each row: coordinator.schedule(step, args=(x,))",
        )
    )
