"""The devices of a job: who takes which, and the first use of each group of them.

A strategy for all processes joins the job and needs devices of each process. What takes this
process's devices only, although there are others, is told so once.

When a group of devices is first used, gloo waits 30 seconds for its processes. That is too short
if one process is at slow work (reading data, compiling), so the groups are used up front, while all
processes are still together: those that every job has when it is joined, those in which a strategy
reduces when it is created.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from distjax._src import hooks, jax_compat, user_lines
from distjax._src.cluster.job import job
from distjax._src.cluster.joining import (
    is_settled,
    is_used,
    join_if_nobody_did,
    read_tf_config,
    use,
)
from distjax._src.cluster.meeting import ComparedFact, agree
from distjax._src.placement.topology import Topology
from distjax.errors import ClusterError, ClusterWarning, message

#: What Slurm and Open MPI tell the processes that they start: how many there are; and a variable
#: that only these have, not the script that starts them.
_LAUNCHERS = (("SLURM_NTASKS", "SLURM_STEP_NODELIST"), ("OMPI_COMM_WORLD_SIZE",) * 2)

_warned: set[str] = set()


# -- for all processes ----------------------------------------------------------


def join_for(strategy: str, devices: Sequence[jax.Device] | None) -> None:
    """Joins the job that the environment names, for a strategy over all processes.

    Args:
      strategy: its name, for errors.
      devices: those that it is given; None: it takes all of the job.

    Raises:
      ValueError: they leave out a process of the job.
      ClusterError: the job cannot be joined, or was joined without distjax.
    """
    if devices is None:
        join_if_nobody_did()
    elif not all(isinstance(d, jax.Device) for d in devices) or jax_compat.only_compiles(devices):
        return
    _require_own_job(strategy)
    if devices is not None:
        _require_every_process(devices, strategy)


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


def warm_up_groups_of(topology: Topology, devices_per_host: int) -> None:
    """Runs a collective in each group of devices in which a strategy over the whole job reduces.

    New groups are first agreed on in a meeting.

    Raises:
      AgreementError: another process has different groups, or does something else.
      StuckError, PeerLostError: a process does not arrive.
    """
    look_for_a_job()
    joined = job()
    if joined is None or len(topology.processes) < joined.num_processes:
        return
    if topology.mesh is None or jax_compat.only_compiles(topology.devices):
        return
    for groups in _groups_of(topology.mesh.devices, topology.num_replicas, devices_per_host):
        if not _spans_processes(groups) or is_used(groups):
            continue
        text = str([[device.id for device in group] for group in groups])
        fact = ComparedFact("the groups of devices of a strategy", text)
        agree("the construction of a strategy", [fact], known_by=[fact])
        use(groups)


def _groups_of(devices: np.ndarray, num_replicas: int, inside: int) -> Iterator[np.ndarray]:
    """Yields devices [G, n] by group: of all, along each axis of the mesh, and of both levels."""
    yield devices.reshape(1, -1)
    for axis, size in enumerate(devices.shape):
        yield np.moveaxis(devices, axis, -1).reshape(-1, size)
    if 1 < inside < num_replicas:
        hosts = devices.reshape(num_replicas // inside, inside, -1)
        for axis in (0, 1):
            yield np.moveaxis(hosts, axis, -1).reshape(-1, hosts.shape[axis])


def _spans_processes(groups: np.ndarray) -> bool:
    """Returns whether any group does; one may lie within a process."""
    return any(len({d.process_index for d in group}) > 1 for group in groups)


# -- what a process does alone ---------------------------------------------------


def warn_once(what: str, text: str) -> None:
    """Gives a `ClusterWarning` about the user's line, once per process for each `what`."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(text, ClusterWarning, user_lines.user_stacklevel())


def warn_of_own_devices(call: str, meant: str) -> None:
    """Warns where there are several processes, once, that a call takes this one's devices only.

    Also in a job that JAX's own `jax.distributed.initialize` has joined.

    Args:
      call: the call, as in "MirroredStrategy()".
      meant: how it says that this is meant.
    """
    if jax.process_count() > 1:
        warn_once(
            call,
            message(
                f"{call} takes the devices of this process only, and the job has several processes",
                got=f"{jax.local_device_count()} of {jax.device_count()} devices",
                why="each process then trains a model of its own, as in tf.distribute",
                fix="dj.MultiWorkerMirroredStrategy(), or a call under its scope, for one model "
                f"over all processes; {meant} if this is meant",
            ),
        )


def look_for_a_job() -> None:
    """Has the first program warn if the environment describes a job by then, and nobody joins it.

    Starts no backend and asks no server.
    """
    if warn_unless_joined not in hooks.on_new_program and _told_by_environment() is not None:
        hooks.on_new_program.append(warn_unless_joined)


def warn_unless_joined(name: str) -> None:
    """Warns if the environment describes a job of several processes that nobody has joined.

    Args:
      name: of the program that this process is about to run.
    """
    if job() is not None or is_settled() or "unjoined" in _warned:
        return
    told = _told_by_environment()
    if told is not None and jax_compat.coordination_client() is None:
        warn_once("unjoined", _unjoined_text(name, told))


def _told_by_environment() -> str | None:
    """Returns the variable that says that there are several processes, with its value."""
    own = os.environ.get("DISTJAX_NUM_PROCESSES", "").strip()
    if own:
        return None if own == "1" else f"DISTJAX_NUM_PROCESSES={own}"
    for variable in ("DISTJAX_COORDINATOR", "DISTJAX_PROCESS_ID"):
        if os.environ.get(variable, "").strip():
            return f"{variable}={os.environ[variable]}"
    for count, own in _LAUNCHERS:
        if own in os.environ and os.environ.get(count, "1") != "1":
            return f"{count}={os.environ[count]}"
    try:
        described = read_tf_config()
    except ClusterError:  # `initialize` says what is wrong with it
        return None
    several = described is not None and described[1] > 1
    return f"TF_CONFIG, with {described[1]} processes" if several and described else None


def _unjoined_text(name: str, told: str) -> str:
    return message(
        f"{name} runs on this process alone, and the environment describes a job of several",
        got=f"{told}, and no call of dj.initialize",
        why="each process then trains a model of its own, on its own devices",
        fix="dj.initialize() at the start of the program, and dj.MultiWorkerMirroredStrategy() for "
        "one model over all processes; dj.initialize(num_processes=1, process_id=0) if this is "
        "meant",
    )


hooks.on_all_devices.append(join_for)
hooks.on_topology.append(warm_up_groups_of)
hooks.on_local_devices.append(warn_of_own_devices)
look_for_a_job()
