"""update, update_non_slot, colocate_vars_with: what runs or lives where a variable does.

The copies of a mirrored variable are equal, so the function runs once, on the one value that they
share. The components of a sync-on-read variable differ: there it runs as a replica function, in
cross-replica context, in a program of its own unless a trace is active.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from distjax._src.context import Destinations, Frame, frames
from distjax._src.placement import (
    PerReplica,
    is_per_replica,
    is_split_over_replicas,
    require_not_split,
    require_same_topology,
)
from distjax._src.program.discovery import Step
from distjax._src.program.program import Program
from distjax._src.replica.arguments import (
    PartitionedTree,
    function_name,
    is_array,
    positional_names,
    user_path,
)
from distjax._src.replica.global_value import GlobalValue, as_user_value, from_user_value
from distjax._src.replica.trace import Given, emit_on_replicas, trace_replica
from distjax._src.strategies.values import parts_of
from distjax._src.typing import KeywordArgs, PositionalArgs, PyTree
from distjax._src.variables.state import TraceState
from distjax._src.variables.storage import call_or_undo
from distjax._src.variables.variable import ExtendedForVariables, Variable
from distjax.errors import (
    ContextError,
    LocalityError,
    StrategyMismatchError,
    describe_value,
    message,
)


class Updated(ExtendedForVariables, Protocol):
    """A strategy's `extended`, as updates need it."""

    def update_frame(self) -> Frame: ...
    def non_slot_devices(self, var_list: Sequence[Variable]) -> Destinations: ...


def require_variable(value: object, method: str) -> None:
    """Raises a TypeError unless `value` is a variable."""
    if isinstance(value, Variable):
        return
    raise TypeError(
        message(
            f"{method} needs a distjax.Variable",
            got=describe_value(value),
            why="only a variable has a strategy and copies",
            fix="with strategy.scope(): v = dj.Variable(...)",
        )
    )


def update(
    extended: Updated,
    variable: Variable,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: bool,
) -> Any:
    """Runs ``fn`` on each copy of `variable`: see `StrategyExtended.update`."""
    require_variable(variable, "update")
    _require_own(extended, variable)
    _require_args(extended, variable, fn, args, kwargs)
    if variable.policy.stacked:
        result = _on_each_copy(extended, variable, fn, args, kwargs)
    else:
        args, kwargs = _one_value_each(extended, args, kwargs)
        result = _all_or_nothing(extended, lambda: fn(variable, *args, **kwargs))
    return result if group else _as_lists(extended, variable.layout.num_copies > 1, result)


def _all_or_nothing(extended: Updated, call: Callable[[], Any]) -> Any:
    """Returns ``call()`` in the frame of an update; if it raises, nothing has been written."""
    frame = extended.update_frame()
    if frame.state is not None:  # what is traced has written nothing yet
        with frames.with_frame(frame):
            return call()
    with extended.variable_lock:
        extended.variable_lock.settle()  # so that a program in between takes the arrays anew
    # What others push to a server in between would be undone too.
    with extended.pause_writers():
        return call_or_undo(frame, call)


def _require_own(extended: Updated, variable: Variable) -> None:
    if variable.strategy is extended.strategy:
        return
    raise StrategyMismatchError(
        f"update needs a variable of {extended.strategy!r}",
        got=f"variable {variable.name!r} of {variable.strategy!r}",
        why="the function runs where the variable's copies are",
        fix="v.strategy.extended.update(v, fn, args), or create v under this strategy's scope",
    )


def _require_args(
    extended: Updated,
    variable: Variable,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    names = positional_names(fn)[1:]
    leaves = jax.tree_util.tree_leaves_with_path((args, kwargs), is_leaf=is_per_replica)
    for path, leaf in leaves:
        where = f"argument {user_path(jax.tree_util.keystr(path), names)}"
        if not isinstance(leaf, PerReplica):
            _require_one_value(leaf, extended, f"{where} of update")
            continue
        require_same_topology(leaf, extended.topology, where)
        if not variable.policy.stacked and extended.num_replicas > 1:
            raise LocalityError(_per_replica_text(variable, fn, where, leaf))


def _require_one_value(leaf: PyTree, extended: Updated, where: str) -> None:
    if not is_split_over_replicas(leaf, extended.topology):  # the parts of one value may be
        require_not_split(leaf, extended.topology, where)


def _per_replica_text(
    variable: Variable, fn: Callable[..., Any], where: str, leaf: PerReplica
) -> str:
    return message(
        f"update of variable {variable.name!r} by {function_name(fn)} needs {where} to be one "
        "value, equal on every copy",
        got=f"a value that differs per replica: a PerReplica of {leaf.num_replicas} values of "
        f"shape {leaf.shape}",
        why="every copy of a mirrored variable gets the same update, or the copies diverge",
        fix="reduce it first: g = strategy.extended.reduce_to('sum', g, v); then "
        "strategy.extended.update(v, fn, args=(g,))",
    )


def _one_value_each(extended: Updated, args: PositionalArgs, kwargs: KeywordArgs) -> Any:
    """Returns placed arguments, with a lone replica's PerReplica as a bare array."""
    leaf = lambda x: (
        as_user_value(GlobalValue(x.stacked, True), extended.topology)
        if isinstance(x, PerReplica)
        else x
    )
    return extended.place_arguments(jax.tree.map(leaf, (args, kwargs), is_leaf=is_per_replica))


def _as_lists(extended: Updated, has_copies: bool, result: PyTree) -> Any:
    """Returns the result with list leaves: an element per local copy, or just one."""
    in_trace = frames.current().state is not None
    topology = extended.topology
    copies = topology.num_replicas if in_trace else len(topology.local_replicas)
    count = copies if has_copies else 1

    def leaf(x: PyTree) -> list[Any]:
        parts = parts_of(topology, x)
        return list(parts) if len(parts) == count or is_per_replica(x) else [x] * count

    return jax.tree.map(leaf, result, is_leaf=lambda x: x is None or is_per_replica(x))


def update_non_slot(
    extended: Updated,
    devices: Destinations,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    group: bool,
) -> Any:
    """Runs ``fn`` on the non-slot devices: see `StrategyExtended.update_non_slot`."""
    if not _is_non_slot(extended, devices):
        raise ValueError(
            message(
                "update_non_slot needs the tuple of devices that non_slot_devices returns",
                got=describe_value(devices),
                why="all non-slot variables have to live on the same devices",
                fix="extended.update_non_slot(extended.non_slot_devices(variables), ...)",
            )
        )
    leaves = jax.tree.leaves((args, kwargs), is_leaf=is_per_replica)
    per_replica = [leaf for leaf in leaves if is_per_replica(leaf)]
    for leaf in leaves:
        if is_per_replica(leaf):
            require_same_topology(leaf, extended.topology, "an argument of update_non_slot")
        else:
            _require_one_value(leaf, extended, "an argument of update_non_slot")
    if per_replica:
        result = _on_each_copy(extended, None, fn, args, kwargs)
    else:
        result = _all_or_nothing(extended, lambda: fn(*args, **kwargs))
    return result if group else _as_lists(extended, _has_counter_copies(extended), result)


def _has_counter_copies(extended: Updated) -> bool:
    """Returns whether a non-slot variable, such as a step counter, has several copies."""
    return extended.placement.layout((), jnp.dtype("int32")).num_copies > 1


def _is_non_slot(extended: Updated, devices: Destinations) -> bool:
    """Returns whether `devices` is a result of `non_slot_devices`."""
    if isinstance(devices, Variable) and devices.strategy is extended.strategy:
        return True
    return isinstance(devices, tuple) and devices == extended.non_slot_devices([])


@contextlib.contextmanager
def colocate(extended: Updated, colocate_with: Destinations) -> Generator[None]:
    """Makes variables created in a block live where `colocate_with` does."""
    frame = frames.current()
    if frame.strategy is not extended.strategy:
        raise ContextError(
            f"colocate_vars_with. Need to be inside the scope of {extended.strategy!r}",
            got=frame.name,
            why="it changes how this strategy creates variables",
            fix="with strategy.scope(), strategy.extended.colocate_vars_with(v): ...",
        )
    variable = colocate_with if isinstance(colocate_with, Variable) else None
    if not _is_non_slot(extended, colocate_with):
        raise LocalityError(
            "`colocate_vars_with` must only be passed a variable created in this "
            "tf.distribute.Strategy.scope(), or what non_slot_devices returned",
            got=describe_value(colocate_with) if variable is None else repr(variable),
            why=f"new variables of {extended.strategy!r} can only live where its variables live",
            fix="strategy.extended.colocate_vars_with(v) for a v made under strategy.scope()",
        )
    with frames.with_block(dataclasses.replace(frame, colocate_with=variable)):
        yield


# -- copies that differ: component by component -------------------------------


def _on_each_copy(
    extended: Updated,
    variable: Variable | None,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    updated = () if variable is None else (variable,)
    names = positional_names(fn)[len(updated) :]

    def on_copy(*args: PyTree, **kwargs: PyTree) -> Any:
        frame = dataclasses.replace(frames.current(), replica_context=None, in_update=True)
        with frames.with_frame(frame):
            return fn(*updated, *args, **kwargs)

    def emit(
        fn: Callable[..., Any], state: TraceState, args: PositionalArgs, kwargs: KeywordArgs
    ) -> Any:
        given = PartitionedTree((args, kwargs), is_array)
        values = list(map(from_user_value, given.leaves))
        named = Given(function_name(fn), given, names, values)
        traced = trace_replica(extended.strategy, fn, named, state, extended.topology)
        emitted = emit_on_replicas(extended.strategy, fn, named, traced, state)
        results = [as_user_value(x, extended.topology) for x in emitted.results]
        return traced.result.combine(results)

    on_copy.__qualname__ = function_name(fn)  # what errors say
    state = frames.current().state
    if state is not None:
        return emit(on_copy, state, args, kwargs)
    name = "update_non_slot" if variable is None else f"update of {variable.name}"
    return Program(cross_replica_step(extended, name, lambda: on_copy, emit)).call(args, kwargs)


def cross_replica_step(
    extended: ExtendedForVariables,
    name: str,
    resolve: Callable[[], Callable[..., Any]],
    emit: Callable[..., Any],
    argument_names: Sequence[str] = (),
) -> Step:
    """Returns cross-replica code of distjax around a function of the user, as a program's step.

    ``emit(fn, state, args, kwargs)`` runs it. A program need not keep alive what ``resolve()``
    returns, the function.
    """
    place, strategy = extended.place_arguments, extended.strategy
    return Step(resolve, emit, place, name, argument_names, strategy, takes_objects=False)
