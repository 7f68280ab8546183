"""Constraining traced values to the replicas of a topology."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from distjax.collectives.mapping import map_replicas
from distjax.placement.topology import Topology


def constrain_to_replicas(value: jax.Array, topology: Topology, *, varying: bool) -> jax.Array:
    """Returns a global value constrained to live on the replicas.

    Args:
      value: [...], or [R, ...] if `varying`.
      topology: the R replicas.
      varying: whether each replica holds its own slice; else each holds a copy.
    """
    value = jnp.asarray(value)
    if topology.mesh is None:
        return value
    if topology.model_axes:
        # A sharding constraint would also pin the model axes, which stay automatic.
        return map_replicas(topology, lambda x: [x], [value], [varying], [varying])[0]
    sharding = topology.per_replica if varying else topology.mirrored
    return lax.with_sharding_constraint(value, sharding)
