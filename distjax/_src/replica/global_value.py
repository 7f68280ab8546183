"""GlobalValue: a global array with its proved locality; and where the outputs of a program live."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from distjax._src import jax_compat
from distjax._src.collectives.mapping import constrain_to_replicas, map_replicas
from distjax._src.jax_compat import ShapedArray
from distjax._src.placement import PerReplica, Topology, note_one_value
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable
from distjax.errors import LocalityError


class GlobalValue(NamedTuple):
    """A value in the global view.

    Attributes:
      array: [R, ...] if replicas may differ, else [...].
      varying: whether the value may differ per replica (T); False if proved equal (M).
    """

    array: Any
    varying: bool


def replica_aval(value: GlobalValue) -> ShapedArray:
    """Returns the shape, dtype and weak type of what one replica sees."""
    aval = jax_compat.aval_of(value.array)
    if value.varying:
        return ShapedArray(aval.shape[1:], aval.dtype, weak_type=aval.weak_type)
    return aval


def stack_replicas(value: GlobalValue, topology: Topology) -> jax.Array:
    """Returns the value as [R, ...], one slice per replica, without communication."""
    if value.varying:
        return value.array
    return map_replicas(topology, lambda x: [x], [value.array], [False], [True])[0]


def as_user_value(value: GlobalValue, topology: Topology) -> Any:
    """Returns what cross-replica code sees: an array for M, a PerReplica for T.

    With one replica, it is always an array.
    """
    if not value.varying:
        array = jnp.asarray(value.array)  # jaxpr literals are not jax.Arrays
        return note_one_value(array, topology.num_replicas)
    if topology.num_replicas == 1:
        return note_one_value(lax.squeeze(value.array, (0,)), 1)
    return PerReplica(value.array, topology)


def from_user_value(value: PyTree) -> GlobalValue:
    """Returns the GlobalValue of an array or PerReplica that cross-replica code made."""
    if isinstance(value, PerReplica):
        return GlobalValue(value.stacked, True)
    return GlobalValue(jnp.asarray(value), False)


def from_variable(variable: Variable, value: jax.Array) -> GlobalValue:
    """Returns what replicas see of a variable whose global value is `value`."""
    form = variable.layout.local_form
    return GlobalValue(form.to_replicas(value), form.varying)


def to_variable(variable: Variable, value: GlobalValue, topology: Topology) -> Any:
    """Inverts `from_variable`: returns the global value; raises if a mirrored one may differ."""
    form = variable.layout.local_form
    if form.varying:
        return form.from_replicas(stack_replicas(value, topology))
    if not value.varying:
        return form.from_replicas(value.array)
    if topology.num_replicas == 1:
        return form.from_replicas(lax.squeeze(value.array, (0,)))
    raise LocalityError(
        f"variable {variable.name!r} needs a value that is equal on every replica",
        got="a value that differs per replica",
        why="it is mirrored: its copies would diverge",
        fix="reduce the value before it is written: ctx.all_reduce('mean', x)",
    )


def replica_mean(value: GlobalValue, topology: Topology) -> jax.Array:
    """Returns the mean over replicas, as one value [...]."""
    if not value.varying:
        return value.array
    return replica_sum(value, topology) / topology.num_replicas


def replica_sum(value: GlobalValue, topology: Topology) -> jax.Array:
    """Returns the sum over replicas, as one value [...]; M counts R times."""
    if not value.varying:
        return value.array * topology.num_replicas
    psum = lambda x: [lax.psum(x, topology.axis_name)]
    return map_replicas(topology, psum, [value.array], [True], [False])[0]


class AlreadyPlaced:
    """A result that is already placed; `place_output` leaves it as it is."""

    __slots__ = ("array",)

    def __init__(self, array: jax.Array):
        self.array = array


def place_output(value: PyTree, topology: Topology) -> Any:
    """Constrains a result of cross-replica code to the strategy's devices."""
    if isinstance(value, AlreadyPlaced):
        return value.array
    if isinstance(value, PerReplica):
        stacked = constrain_to_replicas(value.stacked, value.topology, varying=True)
        return PerReplica(stacked, value.topology)
    return constrain_to_replicas(value, topology, varying=False)


def to_storage(variable: Variable, value: jax.Array) -> jax.Array:
    """Returns the new value of a variable in its stored layout."""
    layout = variable.layout
    return layout.constrain(layout.to_stored(value))
