"""MultiWorkerMirroredStrategy: a replica per device of all processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from distjax.collectives.reductions import CommunicationOptions
from distjax.placement.topology import REPLICA_AXIS, mesh_topology
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.job_devices import devices_of_job
from distjax.strategies.strategy import Strategy
from distjax.variables.variable_placement import MirroredPlacement


class MultiWorkerMirroredStrategy(Strategy):
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

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        axis_name: str = REPLICA_AXIS,
        model_axes: Mapping[str, int] | None = None,
        communication: CommunicationOptions | None = None,
    ):
        found = devices_of_job(devices, "MultiWorkerMirroredStrategy")
        topology = mesh_topology(found, axis_name, model_axes)
        placement = MirroredPlacement(topology)
        super().__init__(StrategyExtended(topology, placement, communication=communication))
