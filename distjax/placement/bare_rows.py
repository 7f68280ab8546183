"""Arrays [R, ...] that are split over the replicas, and are no PerReplica: refused, not guessed."""

from __future__ import annotations

import jax

from distjax import jax_compat
from distjax.errors import LocalityError, describe_value, message
from distjax.placement.topology import Topology


def is_split_over_replicas(value: object, topology: Topology) -> bool:
    """Returns whether `value` is an array of which each replica's devices hold another part."""
    if not isinstance(value, jax.Array) or isinstance(value, jax_compat.Tracer):
        return False
    sharding = value.sharding
    if topology.mesh is None or sharding.device_set != set(topology.devices):
        return False
    if sharding == topology.per_replica:  # of a lone replica too
        return True
    if sharding.is_fully_replicated:
        return False
    indices = sharding.devices_indices_map(value.shape)
    parts = {
        str([indices[d] for d in topology.replica_devices(r)]) for r in range(topology.num_replicas)
    }
    return len(parts) > 1


def require_not_split(value: object, topology: Topology, where: str) -> None:
    """Raises a LocalityError for an array, no PerReplica, that is split over the replicas.

    Args:
      value: what came.
      topology: the replicas.
      where: the user's name of it, e.g. "argument x of step".
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
