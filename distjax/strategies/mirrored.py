"""MirroredStrategy: a replica, and a copy of each variable, per device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from distjax.collectives.reductions import CommunicationOptions
from distjax.placement.topology import REPLICA_AXIS, mesh_topology
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.job_devices import local_devices_or
from distjax.strategies.strategy import Strategy
from distjax.variables.variable_placement import MirroredPlacement


class MirroredStrategy(Strategy):
    """Synchronous training with a replica per device (or per group of devices).

    Args:
      devices: the D devices, replica by replica; default, or if empty: all local ones.
      axis_name: the name of the replica axis inside `run`; code written for
        `pmap(axis_name="batch")` runs unchanged with axis_name="batch".
      model_axes: sizes of axes within one replica, by name. A replica then owns
        as many devices as their product, its code may shard over these axes with
        `lax.with_sharding_constraint`, and R = D / product.
      communication: how `reduce_to`, `batch_reduce_to` and optimizers reduce.

    Raises:
      ValueError: repeated devices, or axes that do not fit.

    Warns:
      ClusterWarning: `devices` omitted in a job of several processes: see
        `MultiWorkerMirroredStrategy`.

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})
      >>> strategy.num_replicas_in_sync, strategy.mesh.shape["model"]
      (2, 2)

    Source: tf.distribute.MirroredStrategy.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        axis_name: str = REPLICA_AXIS,
        model_axes: Mapping[str, int] | None = None,
        communication: CommunicationOptions | None = None,
    ):
        found = local_devices_or(devices, "MirroredStrategy")
        topology = mesh_topology(found, axis_name, model_axes)
        placement = MirroredPlacement(topology)
        super().__init__(StrategyExtended(topology, placement, communication=communication))
