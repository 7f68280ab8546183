"""The strategies with a copy of each variable on each device: only their devices differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from distjax._src.collectives.reductions import CommunicationOptions
from distjax._src.placement import (
    REPLICA_AXIS,
    Topology,
    devices_or_all,
    devices_or_local,
    local_devices,
    mesh_topology,
    one_device_topology,
)
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.strategy import Strategy
from distjax._src.variables.layouts import MirroredPlacement, PlainPlacement


class _ReplicaPerDevice(Strategy):
    """A replica, and a copy of each variable, on each device or group of devices."""

    _find_devices = staticmethod(devices_or_all)
    _kind: str  # for errors: the name of the public class

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        axis_name: str = REPLICA_AXIS,
        model_axes: Mapping[str, int] | None = None,
        communication: CommunicationOptions | None = None,
    ):
        topology = mesh_topology(self._find_devices(devices, self._kind), axis_name, model_axes)
        topology, communication = self._arrange(topology, communication)
        placement = MirroredPlacement(topology)
        super().__init__(StrategyExtended(topology, placement, communication=communication))

    def _arrange(
        self, topology: Topology, communication: CommunicationOptions | None
    ) -> tuple[Topology, CommunicationOptions | None]:
        """Returns the topology, and how to reduce on it."""
        return topology, communication


class MirroredStrategy(_ReplicaPerDevice):
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

    _find_devices = staticmethod(devices_or_local)
    _kind = "MirroredStrategy"


class MultiWorkerMirroredStrategy(_ReplicaPerDevice):
    """Synchronous training with a replica per device of every process of the job.

    `MirroredStrategy` over several processes: each runs the same file and makes every
    call that involves replicas, in the same order. `mesh` and R cover the whole job;
    `local_results`, `worker_devices` and `update(group=False)` cover this process.
    In a single process it is a `MirroredStrategy`.

    Args:
      devices: the D devices, replica by replica, some from each process; default, or
        if empty: all of the job, a process's devices side by side.
      axis_name: the name of the replica axis inside `run`.
      model_axes: sizes of axes within one replica, as in `MirroredStrategy`; a replica's
        devices may span processes.
      communication: how `reduce_to`, `batch_reduce_to` and optimizers reduce.

    Raises:
      ValueError: repeated devices, axes that do not fit, or a process without devices.
      ClusterError: the job named by the environment cannot be joined.

    Example:
      >>> dj.MultiWorkerMirroredStrategy().num_replicas_in_sync == jax.device_count()
      True

    Source: tf.distribute.MultiWorkerMirroredStrategy.
    """

    _kind = "MultiWorkerMirroredStrategy"


class TPUStrategy(_ReplicaPerDevice):
    """Synchronous training with a replica per TPU chip (or group of chips) of the job.

    A `MultiWorkerMirroredStrategy` that knows how the chips are wired: with `model_axes`
    the devices of a replica are torus neighbors; without, the order is JAX's own, which
    keeps a process's chips together. Several slices still form one replica axis, slice by
    slice, and `reduce_to`, `batch_reduce_to` and optimizers reduce within the slices
    first.

    Args:
      devices: the D devices, some from each process; default, or if empty: all of the job.
      axis_name: the name of the replica axis inside `run`.
      model_axes: sizes of axes within one replica, as in `MirroredStrategy`.
      communication: how `reduce_to`, `batch_reduce_to` and optimizers reduce; default:
        in two levels if there are several slices.

    Raises:
      ValueError: repeated devices, axes that do not fit, or a process without devices.
      ClusterError: the job named by the environment cannot be joined.

    Example:
      >>> strategy = dj.TPUStrategy(jax.devices()[:4], model_axes={"model": 2})
      >>> strategy.num_replicas_in_sync, strategy.mesh.axis_names
      (2, ('replica', 'model'))

    Source: tf.distribute.TPUStrategy.
    """

    _kind = "TPUStrategy"

    def _arrange(
        self, topology: Topology, communication: CommunicationOptions | None
    ) -> tuple[Topology, CommunicationOptions | None]:
        slices = _count_slices(topology.devices)
        if topology.model_axes or slices > 1:
            devices = _in_wiring_order(topology, slices)
            topology = mesh_topology(devices, topology.axis_name, dict(topology.model_axes))
        if communication is None and slices > 1:
            communication = CommunicationOptions(devices_per_host=topology.num_replicas // slices)
        return topology, communication


def _count_slices(devices: Sequence[jax.Device]) -> int:
    return len({getattr(device, "slice_index", 0) for device in devices})


def _in_wiring_order(topology: Topology, slices: int) -> list[jax.Device]:
    """Returns the devices by slice, then replica, a replica's devices side by side."""
    sizes = [size for _, size in topology.model_axes]
    per_slice = [topology.num_replicas // slices, *sizes]
    if slices == 1:
        mesh = mesh_utils.create_device_mesh(per_slice, topology.devices)
    else:
        outer = [slices, *(1 for _ in sizes)]
        mesh = mesh_utils.create_hybrid_device_mesh(per_slice, outer, topology.devices)
    return list(np.asarray(mesh).reshape(-1))


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
