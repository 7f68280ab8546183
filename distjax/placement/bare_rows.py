"""Rejects arrays [R, ...] that are split over the replicas but not a PerReplica."""

from __future__ import annotations

import jax
from jax.sharding import Sharding

from distjax import jax_compat
from distjax.errors import LocalityError, describe_value, message
from distjax.placement.topology import Topology


def is_split_over_replicas(value: object, topology: Topology) -> bool:
    """Returns whether each replica's devices hold a different part of array `value`."""
    is_one = isinstance(value, (jax.Array, jax.ShapeDtypeStruct))
    if not is_one or isinstance(value, jax_compat.Tracer):
        return False
    sharding = value.sharding
    if topology.mesh is None or not isinstance(sharding, Sharding):  # None, of a struct
        return False
    if sharding.device_set != set(topology.devices):
        return False
    if topology.num_replicas == 1:  # a single replica holds all of any array
        return False
    if sharding == topology.per_replica:
        return True
    if sharding.is_fully_replicated:
        return False
    indices = sharding.devices_indices_map(value.shape)
    parts = {
        str([indices[d] for d in topology.replica_devices(r)]) for r in range(topology.num_replicas)
    }
    return len(parts) > 1


def require_not_split(value: object, topology: Topology, where: str) -> None:
    """Raises a LocalityError for a bare array that is split over the replicas.

    Args:
      value: the value passed in.
      topology: the replicas.
      where: the user's name for it, e.g. "argument x of step".
    """
    if is_split_over_replicas(value, topology):
        raise LocalityError(
            message(
                f"{where} needs to be a PerReplica, or one value that each replica holds",
                got=f"an array that is split over the {topology.num_replicas} replicas: "
                f"{describe_value(value)}",
                why="its rows may be values of the replicas, as after pmap, or copies of one "
                "value, or all of it may be one value",
                fix="strategy.per_replica(x) if row r is the value of replica r; "
                "strategy.first(x) if the rows are equal; strategy.extended.broadcast_to(x) if "
                "all of it is one value",
            )
        )
