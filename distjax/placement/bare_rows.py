"""Rejects arrays that hold a value for each replica but are not a PerReplica."""

from __future__ import annotations

import jax
from jax.sharding import Sharding

from distjax import jax_compat
from distjax.errors import LocalityError, describe_value, message
from distjax.placement.axis_rules import MIXED
from distjax.placement.row_flow import replica_axis
from distjax.placement.topology import Topology
from distjax.typing import PyTree


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


def holds_rows(value: object, topology: Topology) -> bool:
    """Returns whether a bare array holds a value for each replica, as far as anything tells."""
    if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return False
    return is_split_over_replicas(value, topology) or _is_derived(value, topology)


def _is_derived(value: PyTree, topology: Topology) -> bool:
    """Returns whether `value` was made of the array of a PerReplica, and holds all R values."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return False
    axis = replica_axis(value, topology)
    return axis is not None and (topology.num_replicas > 1 or axis != MIXED)


def require_not_split(value: object, topology: Topology, where: str) -> None:
    """Raises a LocalityError for a bare array that holds a value for each replica.

    Args:
      value: the value passed in.
      topology: the replicas.
      where: the user's name for it, e.g. "argument x of step".
    """
    if not isinstance(value, (jax.Array, jax.ShapeDtypeStruct)):
        return
    num_replicas, what = topology.num_replicas, describe_value(value)
    if is_split_over_replicas(value, topology):
        got = f"an array that is split over the {num_replicas} replicas: {what}"
        why = "its rows may be values of the replicas, as after pmap, or copies of one value, or "
        why += "all of it may be one value"
    elif _is_derived(value, topology):
        got = f"an array made of the values of the {num_replicas} replicas: {what}"
        why = "it was computed from the array [R, ...] of a PerReplica, as jax.tree.map and "
        why += "jax.tree.leaves see it, and each replica would get all of it"
    else:
        return
    raise LocalityError(
        message(
            f"{where} needs to be a PerReplica, or one value that each replica holds",
            got=got,
            why=why,
            fix="strategy.per_replica(x) if row r is the value of replica r; "
            "strategy.first(x) if the rows are equal; strategy.extended.broadcast_to(x) if "
            "all of it is one value",
        )
    )
