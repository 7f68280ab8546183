"""The devices of a strategy: those of the whole job, or those of this process."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from distjax import jax_compat
from distjax.cluster.alone import warn_once
from distjax.cluster.job import job
from distjax.cluster.joining import join_if_nobody_did
from distjax.cluster.warm_up import warm_up_groups
from distjax.collectives.reductions import CommunicationOptions
from distjax.errors import ClusterError, message
from distjax.placement.topology import Topology, devices_or_all


def devices_of_job(devices: Sequence[jax.Device] | None, strategy: str) -> Sequence[jax.Device]:
    """Returns `devices`, or all devices of the job for None or an empty sequence.

    Args:
      devices: the user's argument.
      strategy: the name of the strategy, for errors.

    Raises:
      ValueError: not a sequence, or it leaves out a process of the job.
      ClusterError: the job named by the environment cannot be joined, or was joined
        without distjax.
    """
    if devices is None or (hasattr(devices, "__len__") and not len(devices)):
        join_if_nobody_did()
        _require_own_job(strategy)
        return jax.devices()
    given = devices_or_all(devices)
    if all(isinstance(d, jax.Device) for d in given) and not jax_compat.only_compiles(given):
        _require_own_job(strategy)
        _require_every_process(given, strategy)
    return given


def local_devices_or(devices: Sequence[jax.Device] | None, strategy: str) -> Sequence[jax.Device]:
    """Returns `devices`; for None (with a warning in a larger job) or none, this process's.

    Raises:
      ValueError: not a sequence.
    """
    if devices is None:
        warn_if_alone(f"{strategy}()", f"dj.{strategy}(jax.local_devices())")
    return devices_or_all(devices)


def warn_if_alone(call: str, said: str) -> None:
    """Warns in a job of several processes, once, that a call takes this process's devices only.

    Also in one that JAX's own `jax.distributed.initialize` has joined.

    Args:
      call: the call, as in "MirroredStrategy()".
      said: how it says that this is meant.
    """
    if jax.process_count() > 1:
        warn_once(call, _alone_text(call, said))


def prepare(topology: Topology, communication: CommunicationOptions) -> None:
    """Warms up, on all processes, every device group in which a strategy reduces.

    Raises:
      ValueError: `communication` has groups that do not fit.
      ClusterError: another process creates a different strategy, or none.
    """
    communication.require_equal_hosts(topology.num_replicas)
    joined, mesh = job(), topology.mesh
    if mesh is None or joined is None or len(topology.processes) < joined.num_processes:
        return
    if jax_compat.only_compiles(topology.devices):
        return
    devices = mesh.devices
    warm_up_groups(devices.reshape(1, -1))
    for axis, size in enumerate(devices.shape):
        warm_up_groups(np.moveaxis(devices, axis, -1).reshape(-1, size))
    inside = communication.devices_per_host
    if 1 < inside < topology.num_replicas:
        hosts = devices.reshape(topology.num_replicas // inside, inside, -1)
        for axis in (0, 1):
            warm_up_groups(np.moveaxis(hosts, axis, -1).reshape(-1, hosts.shape[axis]))


def _require_own_job(strategy: str) -> None:
    if jax.process_count() == 1 or job() is not None:
        return
    raise ClusterError(
        message(
            f"{strategy} needs a job that dj.initialize has joined",
            got="a process of several that was initialized by jax.distributed.initialize alone",
            why="distjax compares what the processes do, which without it would train on wrong "
            "numbers in silence",
            fix="dj.initialize() in place of jax.distributed.initialize(), with the same arguments",
        )
    )


def _alone_text(call: str, said: str) -> str:
    return message(
        f"{call} takes the devices of this process only, and the job has several processes",
        got=f"{len(devices_or_all(None))} of {jax.device_count()} devices",
        why="each process then trains a model of its own, as in tf.distribute",
        fix="dj.MultiWorkerMirroredStrategy(), or a call under its scope, for one model over all "
        f"processes; {said} if this is meant",
    )


def _require_every_process(devices: Sequence[jax.Device], strategy: str) -> None:
    present = {device.process_index for device in devices}
    missing = sorted(set(range(jax.process_count())) - present)
    if missing and len(devices):
        raise ValueError(
            message(
                f"{strategy}: devices needs devices of each of the {jax.process_count()} processes",
                got=f"{len(devices)} devices, none of process {', '.join(map(str, missing))}",
                why="every process launches the program, and one without a device cannot",
                fix=f"dj.{strategy}(), or devices=[d for d in jax.devices() if ...] with some of "
                "each process; on this process alone: dj.MirroredStrategy(jax.local_devices())",
            )
        )
