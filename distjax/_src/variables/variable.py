"""Variable: a handle on state that a strategy places and synchronizes.

The current frame says where its value is: in the variable's storage, or in the state of the active
trace. The variable's `Policy` says how values combine. In a replica function a write first combines
what the replicas wrote; in cross-replica context it applies one value to every copy.
"""

from __future__ import annotations

import copy
import itertools
import numbers
import operator
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from distjax._src import hooks, jax_compat, user_mesh
from distjax._src.collectives import ops
from distjax._src.collectives.eager import call_compiled
from distjax._src.collectives.reductions import combine_components
from distjax._src.context import ExtendedLike, Frame, StrategyLike, frames
from distjax._src.jax_compat import ShapedArray
from distjax._src.placement import (
    PerReplica,
    are_exchanged,
    note_one_value,
    require_wholly_here,
    take_apart,
)
from distjax._src.typing import (
    DTypeLike,
    PyTree,
    ReduceOp,
    VariableAggregation,
    VariableModes,
    VariableSynchronization,
)
from distjax._src.user_lines import calling_line
from distjax._src.variables.conversion import Array, convert, is_number, module_of
from distjax._src.variables.description import VariableDescription, as_html_table, describe_stored
from distjax._src.variables.layouts import Layout, VariablePlacement, in_force
from distjax._src.variables.policy import OTHER_AGGREGATIONS, PLAIN, Combine, Policy, resolve_modes
from distjax._src.variables.state import TraceState, leak_text
from distjax._src.variables.storage import StoredArray, VariableLock, keep_formers
from distjax.errors import (
    AggregationError,
    ContextError,
    LocalityError,
    StrategyMismatchError,
    TraceLeakError,
    describe_value,
    message,
    require,
)

_serial_numbers = itertools.count()


class OwningStrategy(StrategyLike, Protocol):
    """The strategy that a variable belongs to."""

    @property
    def extended(self) -> ExtendedForVariables:
        """The part that manages its variables."""
        ...


class ExtendedForVariables(ExtendedLike, Protocol):
    """A strategy's `extended`, as its variables need it."""

    variable_lock: VariableLock

    @property
    def placement(self) -> VariablePlacement: ...
    def make_storage(self, variable: Variable) -> StoredArray: ...
    def copy_variable(self, variable: Variable) -> Any: ...


class Variable:
    """State of one shape and dtype, placed by the active strategy.

    Mirrored (ON_WRITE): one value, with a copy on each replica. Sync-on-read
    (ON_READ): one component per replica, combined when read in cross-replica
    context.

    Args:
      initial_value: array, number, or a function of no arguments that returns one
        (compiled, so that no single device ever holds the whole). Copied.
      trainable: whether to train it; defaults to True, or False for ON_READ.
      name: the name in messages and checkpoints; defaults to "Variable".
      dtype: dtype to convert the initial value to, of its kind or a higher one.
      synchronization: a VariableSynchronization.
      aggregation: a VariableAggregation: how values written by replicas are combined.
      sharding: a PartitionSpec over the model axes of the strategy: which axes of the value the
        devices of one replica hold in parts. ``P(None, "model")`` splits the columns, ``P()``
        keeps it whole. Default: that of the initial value if it is an array split over axes of
        these names and sizes, else what steps make of it. Without model axes it has no effect.

    Locality: V(variable): `P()` on the mesh, or [R, ...] over the replica axis.
    Context: any. In a replica function it is created once, with replica 0's initial
      value, and the function is traced again.

    Raises:
      ValueError: invalid modes, MEAN of a non-floating dtype, or no initial value of numbers.
        Or a sharding that does not fit, or one of an ON_READ variable.
      TypeError, OverflowError: an initial value of a higher kind than `dtype`, or out of its range;
        a sharding of another type.
      TraceLeakError: created inside an inner JAX trace.
      ContextError: created in another order when the function is traced again, or in
        a function passed to `dj.explain`.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     w = dj.Variable(10.0, name="w", aggregation=dj.VariableAggregation.SUM)
      >>> _ = strategy.run(lambda g: w.assign_add(g), args=(jnp.float32(1.5),))
      >>> float(w.value)
      13.0

    Source: tf.Variable under tf.distribute, "Mirrored variables" (TF 1.13).
    """

    strategy: OwningStrategy
    shape: tuple[int, ...]
    dtype: Any
    name: str
    synchronization: VariableSynchronization
    aggregation: VariableAggregation
    #: The user's line that made it, if an argument there says how it is combined.
    made_at: str | None
    trainable: bool
    policy: Policy
    _layout: Layout
    stored: StoredArray
    serial_number: int
    #: Whether the trace that creates it is active.
    is_being_made: bool

    def __new__(
        cls,
        initial_value: PyTree,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation | None = VariableAggregation.NONE,
        sharding: PartitionSpec | NamedSharding | None = None,
    ) -> Any:
        """Creates the variable, or returns the one that the previous trace created here."""
        name = "Variable" if name is None else name
        modes = resolve_modes(synchronization, aggregation, name)
        frame = frames.current()
        given = {} if sharding is None else {"sharding": sharding}  # not all strategies know it
        return frame.strategy.extended.create_variable(
            initial_value, trainable=trainable, name=name, dtype=dtype, modes=modes, **given
        )

    @classmethod
    def declared(
        cls,
        *,
        strategy: OwningStrategy,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        name: str,
        trainable: bool | None,
        modes: VariableModes,
        policy: Policy,
        layout: Layout,
    ) -> Variable:
        """Returns a variable without storage; for strategies."""
        self = object.__new__(cls)
        self.strategy = strategy
        self.shape = tuple(shape)
        self.dtype = dtype if jax_compat.is_key_dtype(dtype) else jnp.dtype(dtype)
        self.name = name
        self.synchronization, self.aggregation = modes
        on_read = self.synchronization is VariableSynchronization.ON_READ
        self.trainable = (not on_read) if trainable is None else bool(trainable)
        self.policy = policy
        self._layout = layout
        self.serial_number = next(_serial_numbers)
        self.is_being_made = False
        self.made_at = None if self.aggregation is VariableAggregation.NONE else calling_line()
        self.stored = strategy.extended.make_storage(self)
        return self

    # -- values ---------------------------------------------------------------

    @property
    def value(self) -> jax.Array:
        """The array [...] that the current context sees.

        In a replica, its own component or its copy of the one value; in cross-replica
        context, the components combined by the aggregation.

        Locality: V(variable); M where components are combined. Context: any, including
          loops, branches and derivatives inside a traced function.
        Cost: in cross-replica context an all-reduce for ON_READ; in a replica a gather
          if the strategy partitions the variable.

        Raises:
          AggregationError: in cross-replica context, for ON_READ with aggregation NONE.
          StrategyMismatchError: the active strategy is not the variable's.
          TraceLeakError: in a user's own `jax.jit`, outside `run` and `dj.jit`.
        """
        return _read(self)

    @value.setter
    def value(self, value: PyTree) -> None:
        text = _no_write_text(self, "v.value = x", value, "v.assign(x)")
        raise AttributeError(text, name="value")

    def assign(self, value: PyTree) -> jax.Array:
        """Sets the variable to `value`; returns the new value as the context sees it.

        Args:
          value: an array [...], a number, or lists of these, with the variable's shape and
            a dtype of no higher kind (bool < int < float < complex); cast within a kind.

        Locality: T or M in a replica, where ON_WRITE combines the replicas' values by
          the aggregation; M in cross-replica context. Context: any.
        Cost: in a replica, an all-reduce for ON_WRITE with an aggregation.

        Raises:
          AggregationError: ON_WRITE with NONE in a replica; ON_READ with NONE in
            cross-replica context.
          LocalityError: `value` is a PerReplica.
          OverflowError: a number or numpy array out of the range of the dtype.
          TypeError: a dtype of a higher kind, or another object.
          ValueError: another shape, or a Python number that SUM would add up.
          StrategyMismatchError: the active strategy is not the variable's.
          TraceLeakError: in an inner trace (`jax.jit`, a `jax.lax` loop, `grad`); for
            loops and branches use `dj.lax`.
        """
        write(self, value, "assign")
        frame = frames.current()
        if self.policy.stacked and frame.in_update:
            state = _state_for(self, frame, "read")
            if not _is_one_replica(state):  # each component has this value
                return _combine(self, _read_raw(self, state), Combine.FIRST)
        return self.value

    def write(self, value: PyTree) -> None:
        """Sets the variable to `value` as `assign` does, without reading back the new value."""
        write(self, value, "assign")

    def assign_add(self, value: PyTree) -> jax.Array:
        """Adds `value` and returns the new value; otherwise like `assign`.

        Raises:
          AggregationError: also for ON_READ with SUM in cross-replica context.
          ContextError: ON_READ, in an update of another variable.
        """
        return self._change(value, "assign_add")

    def assign_sub(self, value: PyTree) -> jax.Array:
        """Subtracts `value` and returns the new value; otherwise like `assign_add`."""
        return self._change(value, "assign_sub")

    def _change(self, value: PyTree, method: str) -> jax.Array:
        frame = frames.current()
        if self.policy.stacked and frame.in_update:
            if not _is_one_replica(_state_for(self, frame, "write")):
                raise ContextError(_update_text(self, frame))  # before it is written
        write(self, value, method)
        return self.value

    def local_results(self) -> tuple[jax.Array, ...]:
        """Returns the components [...] in replica order.

        R arrays for a mirrored or sync-on-read variable, one for a variable that is
        partitioned or in host memory; in a replica function, the replica's own.

        Context: any. Source: tf.distribute.Strategy.unwrap (TF 1.13).
        """
        frame = frames.current()
        state = _state_for(self, frame, "read")
        if _is_one_replica(state):
            return (_read_raw(self, state),)
        if state is not None:
            return self._split(state.read(self))
        _require_unstaged(self)
        return self.stored.components(self._split)

    def _split(self, stored: jax.Array) -> tuple[jax.Array, ...]:
        varying = self.policy.stacked
        if not varying and self.layout.num_copies == 1:
            return (stored,)
        return take_apart(stored, self.strategy.extended.topology, varying=varying)

    # -- views ----------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """How the value is stored."""
        return in_force(self._layout)

    @property
    def sharding(self) -> Sharding | None:
        """Where the storage lives; None: on JAX's default device, uncommitted."""
        return self.layout.sharding

    @property
    def spans_processes(self) -> bool:
        """Whether the storage lies on devices of several processes."""
        return self.sharding is not None and not self.sharding.is_fully_addressable

    @property
    def global_shape(self) -> tuple[int, ...]:
        """[R, ...] for a variable with one component per replica, else `shape`."""
        return self.layout.local_form.global_shape(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of what one replica holds."""
        return self.layout.local_form.local_shape(self.shape)

    @property
    def storage(self) -> jax.Array | None:
        """The stored array in the layout's stored form, or None if there is none."""
        return self.stored.read()

    def traced_type(self, *, local: bool) -> ShapedArray:
        """Returns the type of its value at the start of a trace; raises if it has none."""
        if not self.is_being_made:
            self.stored.require_made()
        if local or are_exchanged():
            return ShapedArray(self.local_shape if local else self.global_shape, self.dtype)
        return self.stored.traced_type()

    def gather(self, local: jax.Array) -> Any:
        """Returns the value that a replica reads, from what it holds."""
        return self.layout.local_form.gather(local)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=int))

    def __repr__(self) -> str:
        modes = f"{self.synchronization.name}, {self.aggregation.name}"
        what = f"{self.name!r}, {self.dtype}{list(self.shape)}, {modes}"
        return f"Variable({what}, of {self.strategy!r})"

    def _repr_html_(self) -> str:
        if self.storage is None or frames.current().state is not None:
            return as_html_table(repr(self))
        value: Any = self.storage
        if isinstance(value, jax.Array):
            value = self.layout.from_stored(self.stored.hand_out(), self.shape)
        is_stacked = self.policy.stacked
        return as_html_table(repr(self), self.describe(), repr(self.strategy), value, is_stacked)

    def describe(self) -> VariableDescription:
        """Returns where it lives and how many bytes it takes, once it has storage."""
        return describe_stored(
            self.name,
            self.storage,  # pyright: ignore[reportArgumentType]
            self.layout,
            shape=self.shape,
            synchronization=self.synchronization.name,
            aggregation=self.aggregation.name,
            trainable=self.trainable,
        )

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        value = self.value
        if not isinstance(value, jax_compat.Tracer):
            require_wholly_here(value, f"variable {self.name!r}")
        return np.array(value, dtype=dtype, copy=copy)

    def __getitem__(self, key: PyTree) -> jax.Array:
        return self.value[key]

    def __setitem__(self, key: PyTree, value: PyTree) -> NoReturn:
        whole = "v.assign(x); of a part: v.assign(v.value.at[index].set(x))"
        raise TypeError(_no_write_text(self, "v[...] = x", value, whole))

    def __iter__(self) -> Any:
        return iter(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec) if spec else repr(self)

    def __eq__(self, other: object) -> Any:
        """Compares the value to numbers and arrays; a variable equals no other variable."""
        return self.value == other if _is_of_numbers(other) else NotImplemented

    def __ne__(self, other: object) -> Any:
        return self.value != other if _is_of_numbers(other) else NotImplemented

    __hash__ = object.__hash__

    #: Makes numpy arrays and scalars defer to the variable's own operators.
    __array_priority__ = 100

    def __copy__(self) -> Variable:
        return self.strategy.extended.copy_variable(self)  # copies the value, as arrays do

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            message(
                f"variable {self.name!r} needs to stay in its process",
                got="pickle of a variable, or of what holds one",
                why="its value lies on the devices of this process, as its strategy says",
                fix="dj.checkpoint.Checkpointer(directory).save(step, tree), and restore(tree) "
                f"there; or pickle {self._host_code()}",
            )
        )

    def _host_code(self) -> str:
        """Returns code for the whole value on the host."""
        if self.strategy.extended.topology.spans_processes:
            return "jax.device_get(strategy.broadcast(v.value)), read on every process"
        return "jax.device_get(v.value)"

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        memo[id(self)] = made = copy.copy(self)
        return made


# -- where a value is ----------------------------------------------------------


def _state_for(variable: Variable, frame: Frame, action: str) -> TraceState | None:
    """Returns the state of the trace that has the value of `variable`; None: its storage has."""
    if frame.owns_variable(variable, read=action == "read"):
        return frame.state
    raise StrategyMismatchError(
        f"a {action} of variable {variable.name!r} needs its own strategy, "
        f"{variable.strategy!r}, to be active",
        got=frame.name,
        why="Mixing different tf.distribute.Strategy objects: the variable lives on the "
        "devices of another strategy",
        fix=f"create it under the strategy that uses it: with strategy.scope(): "
        f"v = dj.Variable(...) (here strategy is {frame.strategy!r}); or run the step "
        "under the variable's own: with strategy.scope(), or dj.pmap(fn, strategy=strategy)",
    )


def _is_one_replica(state: TraceState | None) -> bool:
    return state is not None and state.local_view


def _require_unstaged(variable: Variable) -> None:
    """Raises a TraceLeakError if the storage is read in a trace that distjax does not own."""
    if jax_compat.staging():
        raise TraceLeakError(leak_text(variable, "read", "a trace that distjax does not own"))


# -- reads --------------------------------------------------------------------


def _read_raw(variable: Variable, state: TraceState | None) -> Any:
    """Returns the value in the view of the state, or (None) the stored one in global form."""
    if state is not None:
        return state.read(variable)
    _require_unstaged(variable)
    return variable.stored.value()


def _read(variable: Variable) -> jax.Array:
    """Returns the value of `variable` as the current context sees it."""
    frame = frames.current()
    state = _state_for(variable, frame, "read")
    value = _read_raw(variable, state)
    if state is not None and state.local_view:
        return state.gather(variable) if variable.layout.local_form.is_split else value
    num_replicas = variable.strategy.extended.topology.num_replicas
    if not variable.policy.stacked:
        return note_one_value(value, num_replicas)
    if frame.in_update:
        raise ContextError(_update_text(variable, frame))
    return note_one_value(_aggregate(variable, value), num_replicas)


def read_components(variable: Variable) -> jax.Array:
    """Returns the components [R, ...] of a sync-on-read variable, for a reduction."""
    return _read_raw(variable, _state_for(variable, frames.current(), "read"))


def _aggregate(variable: Variable, stored: jax.Array) -> jax.Array:
    """Returns the cross-replica value of the stored components [R, ...]."""
    rule = variable.policy.cross_read
    if rule is Combine.SUM:
        _require_sums(variable, "a cross-replica read")
    require(
        rule is not Combine.REFUSE,
        f"a cross-replica read of variable {variable.name!r} needs an aggregation",
        got="aggregation NONE. Could not convert from `VariableAggregation.NONE`",
        why=f"its {variable.layout.num_copies} components differ and no aggregation says how to "
        "combine them",
        fix=f"aggregation=dj.VariableAggregation.SUM {OTHER_AGGREGATIONS}; or "
        "look at v.local_results()",
        error=AggregationError,
    )
    return _combine(variable, stored, rule)


def _combine(variable: Variable, stored: jax.Array, rule: Combine) -> jax.Array:
    topology = variable.strategy.extended.topology
    name = f"the read of variable {variable.name!r}"
    return call_compiled(combine_components, stored, topology, rule.name, name=name)


# -- writes -------------------------------------------------------------------


def write(variable: Variable, value: PyTree, method: str) -> None:
    """Writes `value` as the current context requires."""
    if user_mesh.has_user_mesh() and variable.sharding is not None:
        return user_mesh.ignores_user_mesh(write)(variable, value, method)
    frame = frames.current()
    state = _state_for(variable, frame, "write")
    if state is not None:
        state.require_writable(variable)
    elif jax_compat.tracing():
        raise TraceLeakError(leak_text(variable, "write", "a trace that distjax does not own"))
    if isinstance(value, Variable):
        value = value.value
    require_one_value(variable, value, method, frame)
    require_arithmetic(variable, method)
    array = convert(variable, value, method)
    if frame.in_update or variable.policy is PLAIN:
        _write_component(variable, state, array, method)
    elif frame.replica_context is not None and frame.strategy is variable.strategy:
        with jax.named_scope(write_scope(variable)):
            combined = _combine_in_replica(variable, value, jnp.asarray(array), method)
            array = combined.astype(variable.dtype)
            if variable.policy.merges:
                frame.replica_context.merge_call(_write_by_merge, args=(variable, array, method))
            else:
                _write_component(variable, state, array, method)
    else:
        _write_across(variable, state, array, method)
    if state is None and variable.spans_processes:
        for told in hooks.on_host_write:
            told(f"{method} of variable {variable.name!r}", array)


def _write_component(
    variable: Variable, state: TraceState | None, array: Array, method: str
) -> None:
    if state is not None:
        state.write(variable, _apply(state.read(variable), jnp.asarray(array), method))
        return
    stored = variable.stored
    with stored.lock:
        keep_formers([stored])
        has_place = method == "assign" and (stored.is_lost or stored.read() is not None)
        if not has_place:  # an assignment needs no previous value, so it can replace a deleted one
            stored.require_made()
        if method == "assign":
            stored.set(array)
        else:
            stored.add(array, negated=method == "assign_sub")


def _combine_in_replica(
    variable: Variable, value: PyTree, array: jax.Array, method: str
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
                fix="aggregation=dj.VariableAggregation.ONLY_FIRST_REPLICA for a count of steps; "
                f"{method}(jnp.asarray({value!r})) to add it once for each replica",
            )
        )
    is_equal = rule is Combine.MEAN and is_number(value)
    topology, form = variable.strategy.extended.topology, variable.layout.local_form
    if rule is Combine.EACH or is_equal:
        return form.own_part(array)
    if rule is Combine.SUM:
        _require_sums(variable, method)
    if rule.name in ReduceOp.__members__:  # a split variable reduces and splits at once
        return form.reduce(ReduceOp[rule.name], array, topology)
    axis_name, count = topology.axis_name, topology.num_replicas
    return form.own_part(ops.combine(rule.name, array, axis_name, count))


def _write_by_merge(
    strategy: StrategyLike, variable: Variable, array: jax.Array, method: str
) -> None:
    """Writes the combined value; a function for `merge_call`."""
    write(variable, array, method)


def write_scope(variable: Variable) -> str:
    """Returns the named scope of the ops that write a variable in a replica function."""
    return f"distjax_write_{variable.serial_number}"


def _write_across(variable: Variable, state: TraceState | None, array: Array, method: str) -> None:
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


def require_one_value(variable: Variable, value: object, method: str, frame: Frame) -> None:
    """Raises a LocalityError for a PerReplica, which has a value for each replica."""
    if not isinstance(value, PerReplica):
        return
    raise LocalityError(
        f"{method} of variable {variable.name!r} needs one value",
        got=f"a PerReplica of {value.num_replicas} values in {frame.name}",
        why="in one assignment every copy of the variable gets the same value",
        fix=f"reduce it first: v.{method}(strategy.reduce('sum', x)); components are written "
        "in a replica function or by strategy.extended.update",
    )


def require_arithmetic(variable: Variable, method: str) -> None:
    """Raises a TypeError if a variable's dtype has no sums, for methods that need them."""
    if method == "assign" or jnp.issubdtype(variable.dtype, jnp.number):
        return
    is_key = jax_compat.is_key_dtype(variable.dtype)
    new_value = "jax.random.split(key, v.shape)" if is_key else "v.value | x"
    raise TypeError(
        message(
            f"{method} of variable {variable.name!r} needs a dtype that has sums",
            got=f"dtype {variable.dtype}",
            why="neither bools nor PRNG keys can be added",
            fix=f"assign a new value: v.assign({new_value})",
        )
    )


def _require_sums(variable: Variable, what: str) -> None:
    ops.require_sums(variable.dtype, f"{what} of variable {variable.name!r} with aggregation SUM")


def _update_text(variable: Variable, frame: Frame) -> str:
    return message(
        f"a read of sync-on-read variable {variable.name!r} needs a context with one value",
        got=f"{frame.name} for another variable",
        why="the function runs once for all copies, and each has a component of its own",
        fix=f"read it before the update and pass it: update(v, fn, args=({variable.name}.value,))",
    )


def no_aggregation_text(variable: Variable, method: str) -> str:
    """Returns the error text for a write in a replica of a variable with aggregation NONE."""
    return message(
        f"You must specify an aggregation method to update variable {variable.name!r} "
        f"in a replica context ({method})",
        got="aggregation NONE",
        why="each replica would write a value of its own and the mirrored copies would diverge",
        fix="dj.Variable(..., aggregation=dj.VariableAggregation.SUM) "
        f"{OTHER_AGGREGATIONS}, or write it in cross-replica context: "
        f"ctx.merge_call(lambda strategy, x: v.{method}(strategy.reduce('sum', x)), args=(x,))",
    )


def _cross_write_text(variable: Variable, method: str) -> str:
    on_read = variable.synchronization is VariableSynchronization.ON_READ
    mode = f"{'ON_READ' if on_read else 'ON_WRITE'} + {variable.aggregation.name}"
    return message(
        f"SyncOnReadVariable does not support `{method}` in cross-replica context with "
        f"aggregation {variable.aggregation.name} (variable {variable.name!r})",
        got=f"{mode}, in cross-replica context",
        why="no rule says how to divide one value among the components",
        fix=f"{method} it in a replica function, or by strategy.extended.update(v, fn); with "
        "aggregation SUM, v.assign(x) in cross-replica context divides x among them",
    )


# -- operators ------------------------------------------------------------------


def _no_write_text(variable: Variable, written: str, value: PyTree, fix: str) -> str:
    return message(
        f"variable {variable.name!r} needs {fix.split(';')[0]} in place of {written}",
        got=describe_value(value),
        why="a write is a call that returns the new value: in a replica, the values of all "
        "replicas are combined as the aggregation of the variable says",
        fix=f"{fix}; v.assign_add(x), v.assign_sub(x)",
    )


def _is_of_numbers(value: object) -> bool:
    return isinstance(value, (numbers.Number, jax.Array, np.ndarray, np.generic))


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: Variable, *others: PyTree) -> Any:
        others = tuple(o.value if isinstance(o, Variable) else o for o in others)
        return getattr(self.value, name)(*others)

    apply.__name__ = name
    apply.__doc__ = f"Returns ``value.{name}(...)``."
    return apply


for _name in "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split():
    setattr(Variable, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(Variable, f"__r{_name}__", _operator(f"__r{_name}__"))
for _name in "neg pos abs invert lt le gt ge round".split():
    setattr(Variable, f"__{_name}__", _operator(f"__{_name}__"))


def _in_place(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Variable, other: object) -> NoReturn:
        raise TypeError(
            message(
                f"an in-place operator needs an array, not variable {self.name!r}",
                got=f"`v {name}= ...`",
                why="it would bind the name to a new array and leave the variable as it was",
                fix=f"v.assign_add(x), v.assign_sub(x), or v.assign(v.value {name} x)",
            )
        )

    return refuse


_SYMBOLS = (
    "add + sub - mul * truediv / floordiv // mod % pow ** matmul @ and & or | xor ^ lshift << "
    "rshift >>"
).split()
for _name, _symbol in zip(_SYMBOLS[::2], _SYMBOLS[1::2], strict=True):
    setattr(Variable, f"__i{_name}__", _in_place(_symbol))
