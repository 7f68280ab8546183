"""Where the outputs of a program live: on the strategy's devices, as proved."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distjax.collectives.mapping import map_replicas
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.variables.layout import HostLayout, PartitionedLayout


class AlreadyPlaced:
    """A result that already says where it lives: `place_output` leaves it as it is."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array


def place_output(value: Any, topology: Topology) -> Any:
    """Returns a result of cross-replica code, laid out for the user to hold."""
    if isinstance(value, AlreadyPlaced):
        return value.array
    if isinstance(value, PerReplica):
        return PerReplica(_constrain(value.stacked, value.topology, True), value.topology)
    return _constrain(value, topology, False)


def to_storage(variable: Any, value: Any) -> jax.Array:
    """Returns the new value of a variable, laid out as it is stored."""
    layout = variable.layout
    if isinstance(layout, (PartitionedLayout, HostLayout)):
        stored = layout.to_stored(value)
        is_placed = isinstance(layout, HostLayout) or layout.topology.mesh is None
        return stored if is_placed else lax.with_sharding_constraint(stored, layout.sharding)
    if layout.sharding is None:
        return value
    return _constrain(value, variable.strategy.extended.topology, variable.policy.stacked)


def _constrain(value: Any, topology: Topology, varying: bool) -> jax.Array:
    value = jnp.asarray(value)
    if topology.mesh is None:
        return value
    if topology.model_axes:
        # A constraint would also fix the model axes, which stay automatic.
        return map_replicas(topology, lambda x: [x], [value], [varying], [varying])[0]
    sharding = topology.per_replica if varying else topology.mirrored
    return lax.with_sharding_constraint(value, sharding)
