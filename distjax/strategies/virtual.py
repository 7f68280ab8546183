"""VirtualStrategy: R replicas on one device."""

from __future__ import annotations

import jax

from distjax.placement.topology import REPLICA_AXIS, local_devices, one_device_topology
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.strategy import Strategy
from distjax.variables.layouts import MirroredPlacement


class VirtualStrategy(Strategy):
    """R replicas on one device: the numerics of a pod on a laptop.

    Runs the same program as MirroredStrategy, under `vmap` instead of `shard_map`.

    Args:
      num_replicas: R.
      device: the device; default: the first local one.
      axis_name: the name of the replica axis inside `run`.

    Raises:
      ValueError: num_replicas is not a positive int.

    Example:
      >>> strategy = dj.VirtualStrategy(64)
      >>> strategy.run(lambda: dj.get_replica_context().all_reduce("sum", 1))
      Array(64, dtype=int32)
    """

    def __init__(
        self,
        num_replicas: int,
        device: jax.Device | None = None,
        *,
        axis_name: str = REPLICA_AXIS,
    ):
        device = local_devices()[0] if device is None else device
        topology = one_device_topology(device, num_replicas, axis_name)
        super().__init__(StrategyExtended(topology, MirroredPlacement(topology)))
