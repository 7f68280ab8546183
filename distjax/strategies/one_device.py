"""OneDeviceStrategy: one replica on one device, nothing wrapped."""

from __future__ import annotations

import jax

from distjax.placement.topology import REPLICA_AXIS, local_devices, one_device_topology
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.strategy import Strategy
from distjax.variables.layouts import PlainPlacement


class OneDeviceStrategy(Strategy):
    """One replica on one device.

    Values are bare and variables plain: synchronization and aggregation have no
    effect. For comparison with other strategies, and for choosing a device.

    Args:
      device: the device; default: the first local one.
      axis_name: the replica axis inside `run` (of size 1).

    Example:
      >>> strategy = dj.OneDeviceStrategy()
      >>> strategy.run(lambda x: x + 1, args=(jnp.float32(1),))
      Array(2., dtype=float32)

    Source: tf.distribute.OneDeviceStrategy.
    """

    def __init__(self, device: jax.Device | None = None, *, axis_name: str = REPLICA_AXIS):
        device = local_devices()[0] if device is None else device
        topology = one_device_topology(device, 1, axis_name)
        super().__init__(StrategyExtended(topology, PlainPlacement(device), wraps=False))
