"""Creates variables, from the constructor call to storage, in any context.

Outside of traces a variable gets its storage at once. If its initial value comes from a function,
that is compiled with the variable's sharding, so no single device ever holds the whole value.

In a trace that distjax owns, the initial value is a tracer: the `CreationLog` collects it as an
output of the trace. When the function is traced again, the constructor returns the variable already
made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from distjax._src import hooks, jax_compat
from distjax._src.collectives.ops import from_first_replica
from distjax._src.context import frames
from distjax._src.placement import (
    PerReplica,
    Spec,
    Topology,
    adopted_spec,
    require_no_mask,
    require_spec,
    without_alias,
)
from distjax._src.typing import DTypeLike, PyTree, VariableModes
from distjax._src.variables.conversion import (
    Array,
    as_array,
    is_traced,
    to_dtype,
    without_weak_type,
)
from distjax._src.variables.layouts import Layout, StackedLayout, VariablePlacement, layout_by
from distjax._src.variables.policy import PLAIN, Policy, policy_for
from distjax._src.variables.state import TraceState, require_no_trace, require_own_trace
from distjax._src.variables.variable import OwningStrategy, Variable
from distjax.errors import (
    ContextError,
    LocalityError,
    TraceLeakError,
    describe_value,
    message,
    require,
)


def make_variable(
    strategy: OwningStrategy,
    placement: VariablePlacement,
    initial_value: PyTree,
    *,
    trainable: bool | None,
    name: str,
    dtype: DTypeLike | None,
    modes: VariableModes,
    find_policy: Callable[[VariableModes, DTypeLike, str], Policy] | None = None,
    sharding: PartitionSpec | NamedSharding | None = None,
) -> Variable:
    """Returns a new variable, or the one that the previous trace made here.

    `find_policy` maps (modes, dtype, name) to a policy; None: the placement decides. `sharding`
    says what the devices of a replica split.
    """
    state = frames.current().state
    if isinstance(initial_value, Variable):
        initial_value = initial_value.value
    elif getattr(initial_value, "__jax_array__", None) is not None:
        initial_value = initial_value.__jax_array__()  # a value, though Flax's can be called too
    make_initial = initializer_of(initial_value, dtype, name)
    value: Any = None
    if state is None:
        require_no_trace(name)
        aval = _shape_of_initial(make_initial, name)
    elif _is_concrete_in_merge(state, initial_value):
        aval = _shape_of_initial(make_initial, name)
    else:
        require_own_trace(state, name)
        value = jnp.asarray(make_initial())
        aval = jax_compat.aval_of(value)
    if find_policy is None:
        find_policy = policy_for if placement.synchronizes else lambda *_: PLAIN
    policy = find_policy(modes, aval.dtype, name)
    if hooks.is_dry_run():
        raise ContextError(_dry_run_text(name))
    again = None
    if state is not None and state.creations is not None:
        again = state.creations.take(shape=aval.shape, dtype=aval.dtype, name=name)
    if again is not None:
        return again
    spec = _spec(strategy.extended.topology, policy, initial_value, aval, sharding, name)
    variable = Variable.declared(
        strategy=strategy,
        shape=aval.shape,
        dtype=aval.dtype,
        name=name,
        trainable=trainable,
        modes=modes,
        policy=policy,
        layout=_layout(strategy, placement, policy, aval, spec),
    )
    if state is None or state.creations is None:
        _initialize_now(variable, initial_value, make_initial)
    elif state.creations.makes_at_once:
        _initialize_now(variable, initial_value, make_initial)
        state.creations.remembered.append(variable)
    else:
        state.creations.collect(variable, value)
        _bind(state, variable, value)
    return variable


def _bind(state: TraceState, variable: Variable, value: jax.Array) -> None:
    """Gives a variable that a trace has made its initial value there."""
    if not state.local_view:
        state.bind(variable, jnp.broadcast_to(value, variable.global_shape))
        return
    topology = variable.strategy.extended.topology
    # Replica 0's value wins, so all replicas start equal.
    value = from_first_replica(value, topology.axis_name)
    state.bind(variable, variable.layout.local_form.own_part(value))


def copy_variable(variable: Variable) -> Variable:
    """Returns a new variable like `variable`, with a copy of its stored array; not in traces."""
    frame = frames.current()
    require(
        not (frame.is_replica or frame.state is not None or jax_compat.tracing()),
        f"a copy of variable {variable.name!r} needs to be made outside of traces",
        got=frame.name if frame.is_replica else "a trace (dj.jit, jax.jit, ...)",
        why="the copy would hold a value that exists only when the program runs",
        fix="target = copy.copy(v) before the first step; in a step, target.assign(v.value)",
        error=ContextError,
    )
    made = Variable.declared(
        strategy=variable.strategy,
        shape=variable.shape,
        dtype=variable.dtype,
        name=variable.name,
        trainable=variable.trainable,
        modes=(variable.synchronization, variable.aggregation),
        policy=variable.policy,
        layout=variable.layout,
    )
    made.stored.swap(jnp.copy(variable.stored.hand_out()))
    return made


def _shape_of_initial(make_initial: Callable[[], Any], name: str) -> Any:
    try:
        return jax.eval_shape(make_initial)
    except TraceLeakError as error:
        raise TraceLeakError(
            f"the function that makes the initial value of variable {name!r} needs to read "
            "no variable",
            got=str(error).partition("\n")[0].rstrip("."),
            why="it is traced, so that the value is computed where it is stored",
            fix="the value itself: dj.Variable(other.value * 2)",
        ) from error


def _dry_run_text(name: str) -> str:
    return message(
        "dj.explain and dj.check need a function whose variables exist",
        got=f"the creation of variable {name!r} in the function that is explained or checked",
        why="they change nothing, so they cannot create variables",
        fix="create them outside, or guarded by `if self.v is None`, and call the function once "
        "before it is explained or checked",
    )


def _layout(
    strategy: OwningStrategy,
    placement: VariablePlacement,
    policy: Policy,
    aval: jax_compat.ShapedArray,
    spec: Spec,
) -> Layout:
    if policy.stacked:
        return StackedLayout(strategy.extended.topology)
    beside = frames.current().colocate_with
    layout = layout_by(placement, aval.shape, aval.dtype, beside, spec)
    require(
        not isinstance(layout, StackedLayout),
        f"{type(placement).__name__}.layout needs to return a layout of one value",
        got="a StackedLayout" + ("" if beside is None else ", that of colocate_with perhaps"),
        why="the variable has one value, which such a layout would take for one per replica",
        fix="self.layout(colocate_with.shape, colocate_with.dtype) in place of its layout",
    )
    return layout


def _spec(
    topology: Topology,
    policy: Policy,
    initial_value: PyTree,
    aval: jax_compat.ShapedArray,
    sharding: PartitionSpec | NamedSharding | None,
    name: str,
) -> Spec:
    """Returns what the user, or else the initial value, splits within a replica."""
    what = f"variable {name!r}"
    if policy.stacked:
        require(
            sharding is None,
            f"{what} needs no sharding, as a sync-on-read variable",
            got=f"sharding={sharding}",
            why="each replica has its own component, of which each of its devices holds a full "
            "copy",
            fix="leave sharding out; or synchronization=dj.VariableSynchronization.ON_WRITE",
        )
        return None
    if sharding is not None:
        return require_spec(sharding, aval.shape, topology, what)
    return adopted_spec(initial_value, topology, what)


def _is_concrete_in_merge(state: TraceState, initial_value: PyTree) -> bool:
    creations = state.creations
    if creations is None or not creations.makes_at_once:
        return False
    return callable(initial_value) or not is_traced(initial_value)


def initializer_of(
    initial_value: PyTree, dtype: DTypeLike | None, name: str
) -> Callable[[], Array]:
    """Returns a function that makes the array of an initial value, and raises if that is none."""
    if isinstance(initial_value, PerReplica):
        raise LocalityError(
            f"variable {name!r} needs one initial value",
            got=f"a PerReplica of {initial_value.num_replicas} values",
            why="every copy of a variable starts from the same value",
            fix="strategy.reduce('mean', x) first; components are set in a replica function",
        )

    def make() -> Array:
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, jax.Array) and (dtype is None or value.dtype == dtype):
            return without_weak_type(value)
        require_no_mask(value, f"variable {name!r}")
        try:
            array = as_array(value)
            default = jax.dtypes.canonicalize_dtype(array.dtype)
            wanted = jnp.asarray(0, default if dtype is None else dtype).dtype
        except jax.errors.JAXTypeError:  # a tracer error, unrelated to the value
            raise
        except (TypeError, ValueError) as error:
            raise ValueError(_initial_text(value, dtype, name)) from error
        what = f"the initial value of variable {name!r}"
        fix = f"dj.Variable(jnp.asarray(x).astype(jnp.{wanted}))"
        return to_dtype(array, wanted, what, fix, rounds=True)

    return make


def _initial_text(value: object, dtype: DTypeLike | None, name: str) -> str:
    return message(
        f"variable {name!r} needs an initial value of numbers",
        got=describe_value(value) + ("" if dtype is None else f", for dtype {dtype}"),
        why="its value is one array",
        fix="dj.Variable(jnp.zeros(3)), a number, lists of numbers, or a function of these",
    )


def _initialize_now(
    variable: Variable, initial_value: PyTree, make_initial: Callable[[], Array]
) -> None:
    """Computes the initial value and stores it at once, rather than when a trace ends."""
    if variable.storage is not None:  # on devices that only compile there is nothing to compute
        return
    if callable(initial_value) and variable.size > 0:  # JAX cannot place empty outputs
        # Compiled with its output sharding, so it is never whole on one device.
        def make() -> jax.Array:
            value = jnp.broadcast_to(make_initial(), variable.global_shape)
            return variable.layout.to_stored(value)

        with jax_compat.outside_traces():
            variable.stored.swap(compute_initial([variable], make, (), variable.sharding))
        return
    with jax.ensure_compile_time_eval():
        value = make_initial()
        for told in hooks.on_created:
            told([variable], lambda: value)
        variable.stored.set(without_alias(value))


def compute_initial(
    variables: Sequence[Variable],
    make: Callable[..., Any],
    args: tuple[Any, ...],
    shardings: PyTree,
) -> Any:
    """Returns what ``make(*args)`` computes for new variables, each at its sharding."""
    compiled = jax.jit(make, out_shardings=shardings)
    for told in hooks.on_created:
        told(variables, lambda: compiled.lower(*args))
    return compiled(*args)
