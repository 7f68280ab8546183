"""What a read or write of a variable does in each context.

The current frame says where the value is: in the variable's storage, or in the state of the active
trace. The variable's `Policy` says how values combine. In a replica function a write first combines
what the replicas wrote; in cross-replica context it applies one value to every copy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax import hooks, jax_compat, user_mesh
from distjax.collectives import ops
from distjax.collectives.eager import call_compiled
from distjax.collectives.reductions import combine_components
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame
from distjax.errors import (
    AggregationError,
    ContextError,
    LocalityError,
    StrategyMismatchError,
    message,
)
from distjax.modes import ReduceOp, VariableSynchronization
from distjax.placement.per_replica import PerReplica
from distjax.placement.rows import note_one_value
from distjax.typing import ArrayLike, PyTree
from distjax.variables import state as states
from distjax.variables.conversion import Array, convert, is_number, module_of
from distjax.variables.policy import PLAIN, Combine
from distjax.variables.state import State
from distjax.variables.storage import RemoteStorage, reuse_components
from distjax.variables.stored_variable import StoredVariable


def read(variable: StoredVariable) -> jax.Array:
    """Returns the value of `variable` as the current context sees it."""
    frame = frames.current()
    state = _state_for(variable, frame, "read")
    return _read_view(variable, state, frame)


def read_assigned(variable: StoredVariable) -> jax.Array:
    """Returns what a sync-on-read variable was just assigned, as the current context sees it."""
    frame = frames.current()
    state = _state_for(variable, frame, "read")
    if frame.in_update and not state.local_view:  # each component has this value
        return _combine(variable, state.read(variable), Combine.FIRST)
    return _read_view(variable, state, frame)


def require_readable(variable: StoredVariable) -> None:
    """Raises if a write of a sync-on-read variable could not return its new value."""
    frame = frames.current()
    if frame.in_update and not _state_for(variable, frame, "write").local_view:
        raise ContextError(_update_text(variable, frame))


def write(variable: StoredVariable, value: PyTree, method: str) -> None:
    """Writes `value` as the current context requires."""
    if variable.sharding is None:
        _write(variable, value, method)
    else:
        _write_off_mesh(variable, value, method)


def _write(variable: StoredVariable, value: PyTree, method: str) -> None:
    frame = frames.current()
    state = _state_for(variable, frame, "write")
    state.require_writable(variable)
    if isinstance(value, StoredVariable):
        value = value.value  # pyright: ignore[reportAttributeAccessIssue]: always a `Variable`
    require_one_value(variable, value, method, frame)
    require_arithmetic(variable, method)
    array = convert(variable, value, method)
    if frame.in_update or variable.policy is PLAIN:
        _write_component(variable, state, array, method)
    elif _is_local(variable, frame):
        with jax.named_scope(write_scope(variable)):
            combined = _combine_in_replica(variable, value, jnp.asarray(array), method)
            array = combined.astype(variable.dtype)
            if variable.policy.merges:
                frame.replica_context.merge_call(_write_by_merge, args=(variable, array, method))
            else:
                _write_component(variable, state, array, method)
    else:
        _write_across(variable, state, array, method)
    if state is states.STORAGE and variable.spans_processes:
        for told in hooks.on_host_write:
            told(f"{method} of variable {variable.name!r}", array)


_write_off_mesh = user_mesh.ignores_user_mesh(_write)


def components(variable: StoredVariable) -> tuple[jax.Array, ...]:
    """Returns the components of `variable` in replica order."""
    frame = frames.current()
    state = _state_for(variable, frame, "read")
    if state.local_view:
        return (state.read(variable),)
    split = variable.strategy.extended.split_components
    if state is not states.STORAGE:
        return split(variable, state.read(variable))
    with variable.stored.lock:  # the parts are remembered together with their array
        return reuse_components(variable.stored, split(variable, state.read(variable)))


def read_components(variable: StoredVariable) -> jax.Array:
    """Returns the components [R, ...] of a sync-on-read variable, for a reduction."""
    return _state_for(variable, frames.current(), "read").read(variable)


def initialize(variable: StoredVariable, value: PyTree) -> None:
    """Stores the initial `value` [...] of a new variable, once for each component."""
    if variable.policy.stacked:
        value = jnp.broadcast_to(jnp.asarray(value), variable.global_shape)
    if variable.layout.hands_out_copies:  # the stored form is computed on the variable's devices
        value = variable.on_own_devices(value)
    variable.store(_copied(value))


def _copied(value: ArrayLike) -> Any:
    """Returns a copy that nobody else holds."""
    return jnp.copy(value) if isinstance(value, jax.Array) else np.array(value)


def _owned(array: Array, shape: tuple[int, ...]) -> Any:
    """Returns what `convert` made, broadcast to `shape`, for nobody else to hold."""
    whole = module_of(array).broadcast_to(array, shape)
    return _copied(whole) if isinstance(whole, jax.Array) else whole  # the user keeps JAX's


# -- ownership ----------------------------------------------------------------


def _state_for(variable: StoredVariable, frame: Frame, action: str) -> Any:
    if frame.owns_variable(variable, read=action == "read"):
        return states.STORAGE if frame.state is None else frame.state
    raise StrategyMismatchError(
        message(
            f"a {action} of variable {variable.name!r} needs its own strategy, "
            f"{variable.strategy!r}, to be active",
            got=frame.name,
            why="Mixing different tf.distribute.Strategy objects: the variable lives on the "
            "devices of another strategy",
            fix=f"create it under the strategy that uses it: with strategy.scope(): "
            f"v = dj.Variable(...) (here strategy is {frame.strategy!r}); or run the step "
            "under the variable's own: with strategy.scope(), or dj.pmap(fn, strategy=strategy)",
        )
    )


def _is_local(variable: StoredVariable, frame: Frame) -> bool:
    return frame.replica_context is not None and frame.strategy is variable.strategy


# -- reads --------------------------------------------------------------------


def _read_view(variable: StoredVariable, state: State, frame: Frame) -> jax.Array:
    stored = state.read(variable)
    if (
        isinstance(state, states.TraceState)
        and state.local_view
        and variable.layout.local_form.is_split
    ):
        return state.gather(variable)
    if state.local_view:
        return stored
    num_replicas = variable.strategy.extended.topology.num_replicas
    if not variable.policy.stacked:
        return note_one_value(stored, num_replicas)
    if frame.in_update:
        raise ContextError(_update_text(variable, frame))
    return note_one_value(aggregate(variable, stored), num_replicas)


def aggregate(variable: StoredVariable, stored: jax.Array) -> jax.Array:
    """Returns the cross-replica value of the stored components [R, ...]."""
    rule = variable.policy.cross_read
    if rule is Combine.SUM:
        _require_sums(variable, "a cross-replica read")
    if rule is Combine.REFUSE:
        raise AggregationError(
            message(
                f"a cross-replica read of variable {variable.name!r} needs an aggregation",
                got="aggregation NONE. Could not convert from `VariableAggregation.NONE`",
                why=f"its {variable.layout.num_copies} components differ and nothing says how they "
                "combine",
                fix="aggregation=dj.VariableAggregation.SUM (or MEAN, ONLY_FIRST_REPLICA); or "
                "look at v.local_results()",
            )
        )
    return _combine(variable, stored, rule)


def _combine(variable: StoredVariable, stored: jax.Array, rule: Combine) -> jax.Array:
    topology = variable.strategy.extended.topology
    name = f"the read of variable {variable.name!r}"
    return call_compiled(combine_components, stored, topology, rule.name, name=name)


# -- writes -------------------------------------------------------------------


def _write_component(variable: StoredVariable, state: State, array: Array, method: str) -> None:
    if state is states.STORAGE:
        _write_storage(variable, array, method)
    else:
        state.write(variable, _apply(state.read(variable), jnp.asarray(array), method))


def _write_storage(variable: StoredVariable, array: Array, method: str) -> None:
    array = variable.on_own_devices(array)
    with variable.stored.lock:
        is_gone = method == "assign" and (variable.stored.is_lost or variable.storage is not None)
        if not is_gone:  # an assignment needs no previous value, so it can replace a deleted one
            variable.require_initialized()
        if method == "assign":
            states.STORAGE.write(variable, _owned(array, variable.global_shape))
            return
        amount = jnp.asarray(array)
        if isinstance(variable.stored, RemoteStorage):
            variable.stored.add(amount if method == "assign_add" else -amount)
        else:
            states.STORAGE.write(variable, _apply(variable.stored_value, amount, method))


def _combine_in_replica(
    variable: StoredVariable, value: PyTree, array: jax.Array, method: str
) -> jax.Array:
    """Returns what this replica writes, from the values that all replicas gave."""
    rule = variable.policy.replica_write
    if rule is Combine.REFUSE:
        raise AggregationError(no_aggregation_text(variable, method))
    on_write = variable.synchronization is VariableSynchronization.ON_WRITE
    if rule is Combine.SUM and on_write and is_number(value):
        raise ValueError(
            message(
                f"{method} of variable {variable.name!r} with aggregation SUM needs an array",
                got=f"the Python number {value!r}. A non-DistributedValues value {value} cannot be "
                "reduced with the given reduce op ReduceOp.SUM",
                why="it is the same object on every replica, so it is unclear whether it is to be "
                "summed",
                fix=f"{method}(jnp.asarray({value!r})), which sums over the replicas",
            )
        )
    is_equal = rule is Combine.MEAN and is_number(value)
    topology, form = variable.strategy.extended.topology, variable.layout.local_form
    if rule is Combine.EACH or is_equal:
        return form.own_part(array)
    if rule is Combine.FIRST:
        first = ops.from_first_replica(array, topology.axis_name)
        return form.own_part(first)
    if rule is Combine.SUM:
        _require_sums(variable, method)
    return form.reduce(ReduceOp[rule.name], array, topology)


def _write_by_merge(
    strategy: StrategyLike, variable: StoredVariable, array: jax.Array, method: str
) -> None:
    """Writes the combined value; a function for `merge_call`."""
    _write(variable, array, method)


def write_scope(variable: StoredVariable) -> str:
    """Returns the named scope of the ops that write a variable in a replica function."""
    return f"distjax_write_{variable.serial_number}"


def _write_across(variable: StoredVariable, state: State, array: Array, method: str) -> None:
    rule = variable.policy.cross_assign if method == "assign" else variable.policy.cross_add
    if rule is Combine.REFUSE:
        raise AggregationError(_cross_write_text(variable, method))
    if rule is Combine.SPLIT:
        _require_sums(variable, method)
        split = _split_total if isinstance(array, np.ndarray) else _split_on_devices
        array = split(array, variable.layout.num_copies)
    elif variable.policy.stacked:
        array = module_of(array).broadcast_to(array, variable.global_shape)
    _write_component(variable, state, array, method)


def _split_total(total: Array, num_components: int) -> Any:
    """Returns components [R, ...] that sum to `total`, exactly for integers and bools."""
    module = module_of(total)
    if jnp.issubdtype(total.dtype, jnp.integer) or total.dtype == jnp.bool_:
        # Widened first, since a narrow dtype may not hold R itself.
        wide = total.astype(jnp.int32 if total.dtype.itemsize < 4 else total.dtype)
        index = module.arange(num_components, dtype=wide.dtype)
        index = index.reshape((num_components,) + (1,) * total.ndim)
        share, rest = wide // num_components, wide % num_components
        return (share[None] + (index < rest[None]).astype(wide.dtype)).astype(total.dtype)
    share = (total / num_components).astype(total.dtype)
    return module.broadcast_to(share, (num_components, *total.shape))


# Compiled, since eager constants would trip transfer guards.
_split_on_devices = jax.jit(_split_total, static_argnums=1)


def _apply(old: jax.Array, array: jax.Array, method: str) -> jax.Array:
    if method == "assign":
        return array if array.shape == old.shape else jnp.broadcast_to(array, old.shape)
    return old + array if method == "assign_add" else old - array


# -- checks -------------------------------------------------------------------


def require_one_value(variable: StoredVariable, value: object, method: str, frame: Frame) -> None:
    """Raises a LocalityError for a PerReplica, which has a value for each replica."""
    if not isinstance(value, PerReplica):
        return
    raise LocalityError(
        message(
            f"{method} of variable {variable.name!r} needs one value",
            got=f"a PerReplica of {value.num_replicas} values in {frame.name}",
            why="in one assignment every copy of the variable gets the same value",
            fix=f"reduce it first: v.{method}(strategy.reduce('sum', x)); components are written "
            "in a replica function or by strategy.extended.update",
        )
    )


def require_arithmetic(variable: StoredVariable, method: str) -> None:
    """Raises a TypeError if a variable's dtype has no sums, for methods that need them."""
    if method == "assign" or jnp.issubdtype(variable.dtype, jnp.number):
        return
    is_key = jax_compat.is_key_dtype(variable.dtype)
    new_value = "jax.random.split(key, v.shape)" if is_key else "v.value | x"
    raise TypeError(
        message(
            f"{method} of variable {variable.name!r} needs a dtype that has sums",
            got=f"dtype {variable.dtype}",
            why="neither truth values nor PRNG keys can be added",
            fix=f"assign a new value: v.assign({new_value})",
        )
    )


def _require_sums(variable: StoredVariable, what: str) -> None:
    ops.require_sums(variable.dtype, f"{what} of variable {variable.name!r} with aggregation SUM")


def _update_text(variable: StoredVariable, frame: Frame) -> str:
    return message(
        f"a read of sync-on-read variable {variable.name!r} needs a context with one value",
        got=f"{frame.name} for another variable",
        why="the function runs once for all copies, and each has a component of its own",
        fix=f"read it before the update and pass it: update(v, fn, args=({variable.name}.value,))",
    )


def no_aggregation_text(variable: StoredVariable, method: str) -> str:
    """Returns the error text for a write in a replica of a variable with aggregation NONE."""
    return message(
        f"You must specify an aggregation method to update variable {variable.name!r} "
        f"in a replica context ({method})",
        got="aggregation NONE",
        why="each replica would write a value of its own and the mirrored copies would diverge",
        fix="dj.Variable(..., aggregation=dj.VariableAggregation.SUM) (or MEAN, "
        "ONLY_FIRST_REPLICA), or write it in cross-replica context: "
        f"ctx.merge_call(lambda strategy, x: v.{method}(strategy.reduce('sum', x)), args=(x,))",
    )


def _cross_write_text(variable: StoredVariable, method: str) -> str:
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    mode = f"{'ON_READ' if on_read else 'ON_WRITE'} + {variable.aggregation.name}"
    return message(
        f"SyncOnReadVariable does not support `{method}` in cross-replica context with "
        f"aggregation {variable.aggregation.name} (variable {variable.name!r})",
        got=f"{mode}, in cross-replica context",
        why="nothing says how one value is shared out among the components",
        fix=f"{method} it in a replica function, or by strategy.extended.update(v, fn); with "
        "aggregation SUM, v.assign(x) in cross-replica context divides x among them",
    )
