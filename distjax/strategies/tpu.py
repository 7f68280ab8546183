"""TPUStrategy: a replica per chip of a slice, of a pod, or of several slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from distjax.collectives.reductions import CommunicationOptions
from distjax.placement.topology import REPLICA_AXIS, Topology, mesh_topology
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.job_devices import devices_of_job
from distjax.strategies.strategy import Strategy
from distjax.variables.variable_placement import MirroredPlacement


class TPUStrategy(Strategy):
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

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        axis_name: str = REPLICA_AXIS,
        model_axes: Mapping[str, int] | None = None,
        communication: CommunicationOptions | None = None,
    ):
        found = devices_of_job(devices, "TPUStrategy")
        topology = mesh_topology(found, axis_name, model_axes)
        slices = _count_slices(topology.devices)
        if model_axes or slices > 1:
            topology = mesh_topology(_in_wiring_order(topology, slices), axis_name, model_axes)
        if communication is None and slices > 1:
            communication = CommunicationOptions(devices_per_host=topology.num_replicas // slices)
        placement = MirroredPlacement(topology)
        super().__init__(StrategyExtended(topology, placement, communication=communication))


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
