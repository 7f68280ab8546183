"""`initialize`: how a process learns which job it belongs to, and joins it.

What it is told comes from arguments, then environment variables, then the cluster that JAX detects,
then TF_CONFIG.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distjax._src import hooks, jax_compat, user_lines
from distjax._src.cluster import roll_call
from distjax._src.cluster.ending import Notice, watch_the_end
from distjax._src.cluster.job import Job, Settings, Timeouts, job, record, set_job
from distjax._src.cluster.meeting import ComparedFact, agree
from distjax._src.placement.topology import Topology
from distjax.errors import ClusterError, ClusterWarning, is_int, message, require

_one_at_a_time = threading.Lock()
_joined_with: list[Settings] = []


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    coordinator_bind_address: str | None = None,
    cluster_detection_method: str | None = None,
    initialization_timeout: float = 60,
    heartbeat_timeout: float = 10,
    shutdown_timeout: float = 10,
    step_deadline: float = 600.0,
    meeting_timeout: float | None = None,
    phase_timeout: float = 3600.0,
    **mtls: str | bool | None,
) -> None:
    """Joins the multi-process job that this process belongs to.

    Call it before any array or device is used. Arguments that are not given are taken from the
    environment variables DISTJAX_COORDINATOR, DISTJAX_NUM_PROCESSES and DISTJAX_PROCESS_ID, then
    from the cluster that JAX detects (Slurm, Open MPI, Kubernetes, TPU) or that TF_CONFIG
    describes. If nothing indicates a job, the program is a single process: nothing listens, and
    this returns. A second call with equal arguments does nothing.

    In a multi-process job, an uncaught exception ends the process with an exit code that says
    why, and the program ends when all processes reach its end.

    Args:
      coordinator_address: "host:port" of process 0. On loopback, nothing listens beyond it.
      num_processes: the number of processes.
      process_id: the index of this process, from 0.
      local_device_ids: the GPUs that this process of the job uses; None: all visible ones.
      coordinator_bind_address: where process 0 listens, if not at `coordinator_address`.
      cluster_detection_method: as in `jax.distributed.initialize`; "deactivate" turns it off.
      initialization_timeout: seconds within which all processes must join.
      heartbeat_timeout: seconds without a heartbeat after which a process is considered lost.
      shutdown_timeout: seconds that a process waits at its end for the others.
      step_deadline: seconds that a program over all processes may take from its launch, and
        within which all must arrive at the next batch of a dataset or at a checkpoint.
      meeting_timeout: seconds within which all must arrive where processes compare what they do;
        None: 60, or `step_deadline` if that is less.
      phase_timeout: seconds that one process may spend compiling, reading data or at a checkpoint.
      **mtls: JAX's options for encrypted connections to the coordinator (`mtls_*`,
        `verify_secure_credentials`), if JAX has them.

    Raises:
      ClusterError: the arguments do not describe a place in a job; a process is missing,
        duplicated or different; a backend is already in use; or this process has already
        joined with other arguments.
      TypeError: an unknown option.
    """
    place = (coordinator_address, num_processes, process_id)
    waits = (initialization_timeout, heartbeat_timeout, shutdown_timeout)
    bounds = (step_deadline, meeting_timeout, phase_timeout)
    bind = coordinator_bind_address
    with _one_at_a_time, _ends_uncaught():
        asked = _read_int("DISTJAX_STEP_DEADLINE", 600)  # of the launcher, unless given here
        if asked and step_deadline == 600.0:
            bounds = (float(asked), meeting_timeout, phase_timeout)
        timeouts = make_timeouts(*waits, *bounds)
        inspect.signature(jax.distributed.initialize).bind_partial(**mtls)
        given = Request(*place, as_device_ids(local_device_ids))
        _join(find_settings(given, cluster_detection_method, bind, timeouts, mtls))


@contextlib.contextmanager
def _ends_uncaught() -> Generator[None]:
    """Makes an uncaught `ClusterError` end the process with its own exit code."""
    try:
        yield
    except ClusterError:
        watch_the_end()
        raise


def join_if_nobody_did() -> None:
    """Calls `initialize` unless already done; for strategies over all processes."""
    if not _joined_with:
        initialize()


def is_settled() -> bool:
    """Returns whether `initialize` has been called; the program may still be of one process."""
    return bool(_joined_with)


def _join(settings: Settings) -> None:
    if _joined_with:
        _require_equal(_joined_with[0], settings)
        return
    if settings.num_processes > 1:
        _require_in_time(settings)
        ending = watch_the_end()
        places = roll_call.hold_roll_call(settings)
        _join_jax(settings)
        client = jax_compat.coordination_client()
        joined = Job(settings.process_id, settings.num_processes, client, settings.timeouts, places)
        set_job(joined)
        ending.watch(joined)
        _use_all()
    _joined_with.append(settings)
    record("joined")


def _join_jax(settings: Settings) -> None:
    """Joins JAX's own rendezvous, with gloo listening at the address of `collectives_host`."""
    assert settings.coordinator_address is not None
    host, port = roll_call.split_address(settings.coordinator_address, "coordinator_address")
    bind = settings.coordinator_bind_address
    own_bind = bind if settings.process_id == 0 else None
    gloo_host = roll_call.collectives_host(settings.coordinator_address, own_bind)
    jax_compat.make_gloo_listen_at(gloo_host)
    timeouts = settings.timeouts
    with jax_compat.delaying_preemption_service(Notice()):
        jax.distributed.initialize(
            settings.coordinator_address,
            settings.num_processes,
            settings.process_id,
            local_device_ids=settings.local_device_ids,
            coordinator_bind_address=bind
            or roll_call.join_address(roll_call.resolve_host(host, port), port),
            cluster_detection_method="deactivate",  # already done
            initialization_timeout=math.ceil(timeouts.initialization_timeout),
            heartbeat_timeout_seconds=math.ceil(timeouts.heartbeat_timeout),
            shutdown_timeout_seconds=math.ceil(timeouts.shutdown_timeout),
            **dict(settings.mtls),
        )


def _require_equal(former: Settings, settings: Settings) -> None:
    require(
        settings == former,
        "initialize needs equal arguments when it is called again",
        got=former.describe_difference(settings),
        why="a process joins one job, once, for as long as it lives",
        fix="call dj.initialize once, at the start of the program",
        error=ClusterError,
    )


def _require_in_time(settings: Settings) -> None:
    first_use = jax_compat.first_use_of_a_backend()
    if jax_compat.coordination_client() is not None:
        got = "jax.distributed.initialize has been called"
        fix = "call dj.initialize in place of jax.distributed.initialize, with the same arguments"
    elif first_use is not None:
        got = f"a backend that is in use since {first_use}"
        fix = "call dj.initialize first: before jax.devices(), arrays and strategies"
    else:
        return
    raise ClusterError(
        message(
            f"initialize of process {settings.process_id} needs to come before JAX is used",
            got=got,
            why="the devices of a process become part of a job when its backend starts",
            fix=fix,
        )
    )


# -- what a process is told about its job ----------------------------------------

#: The longest time that JAX takes.
_MAX_SECONDS = 2**31 - 1

#: What defines a job: all three are needed, or none.
_PLACE = ("coordinator_address", "num_processes", "process_id")


@dataclasses.dataclass(frozen=True)
class Request:
    """The place of this process in a job, as far as known."""

    coordinator_address: str | None
    num_processes: int | None
    process_id: int | None
    local_device_ids: tuple[int, ...] | None

    def is_empty(self) -> bool:
        """Returns whether nothing indicates a job."""
        return all(getattr(self, name) is None for name in _PLACE)

    def filled_from(self, other: Request) -> Request:
        """Returns this request with missing fields taken from `other`."""
        missing = {name: x for name, x in vars(other).items() if getattr(self, name) is None}
        return dataclasses.replace(self, **missing)


def find_settings(
    given: Request,
    detection_method: str | None,
    bind_address: str | None,
    timeouts: Timeouts,
    mtls: Mapping[str, object],
) -> Settings:
    """Resolves the settings: arguments first, then environment, then detection."""
    request = given.filled_from(_read_environment())
    if None in dataclasses.astuple(request) and detection_method != "deactivate":
        request = _detect(request, detection_method, timeouts)
    if request.is_empty() and detection_method in (None, "deactivate"):
        request = dataclasses.replace(request, num_processes=1)
    _require_place(request)
    return Settings(
        request.coordinator_address,
        int(request.num_processes or 1),
        int(request.process_id or 0),
        request.local_device_ids,
        bind_address or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"),
        timeouts,
        _read_int("DISTJAX_ATTEMPT") or 0,
        tuple(sorted(mtls.items())),
    )


def make_timeouts(
    initialization: float,
    heartbeat: float,
    shutdown: float,
    step_deadline: float,
    meeting: float | None,
    phase: float,
) -> Timeouts:
    """Returns a job's timeouts; meetings default to a minute or a step, if shorter."""
    waits = 60.0 if meeting is None else meeting
    found = Timeouts(initialization, heartbeat, shutdown, step_deadline, waits, phase)
    for name, value in vars(found).items():
        require(
            (is_int(value) or isinstance(value, float)) and 0 < value <= _MAX_SECONDS,
            f"{name} of initialize needs to be a number of seconds, up to {_MAX_SECONDS}",
            got=repr(value),
            why="every wait of a job ends, and this is how long it may be",
            fix=f"dj.initialize(..., {name}=60)",
            error=ClusterError,
        )
    if meeting is None:
        return dataclasses.replace(found, meeting_timeout=min(step_deadline, 60.0))
    return found


def as_device_ids(ids: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns `ids` as a tuple, or None for all devices."""
    if ids is None:
        return None
    found = (ids,) if isinstance(ids, (int, str)) else tuple(ids)
    require(
        all(is_int(i) and i >= 0 for i in found),
        "local_device_ids of initialize needs to be a number, or several",
        got=repr(ids),
        why="they say which of this machine's GPUs are those of this process",
        fix="dj.initialize(..., local_device_ids=[0, 1])",
        error=ClusterError,
    )
    return tuple(int(i) for i in found)


def _read_environment() -> Request:
    address = os.environ.get("DISTJAX_COORDINATOR") or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count, own = _read_int("DISTJAX_NUM_PROCESSES", 2), _read_int("DISTJAX_PROCESS_ID")
    return Request(address or None, count, own, None)


def _read_int(variable: str, example: int = 0) -> int | None:
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    if text.isdecimal():
        return int(text)
    raise ClusterError(
        message(
            f"the environment variable {variable} needs to be a number",
            got=repr(text),
            why="it says how this process takes part in a job",
            fix=f"{variable}={example}, or unset it",
        )
    )


def _detect(known: Request, method: str | None, timeouts: Timeouts) -> Request:
    """Fills `known` in from JAX's cluster detection, then from TF_CONFIG."""
    timeout = math.ceil(timeouts.initialization_timeout)
    try:
        found = jax_compat.detect_cluster(*dataclasses.astuple(known), method, timeout)
    except Exception as error:  # from a scheduler, a metadata server, ...
        raise ClusterError(
            message(
                "the cluster that this process was started in needs to be one that JAX can read",
                got=f"{type(error).__name__}: {error}",
                why="JAX sees signs of a cluster, and failed to find out its processes",
                fix="dj.initialize(address, num_processes, process_id, "
                "cluster_detection_method='deactivate')",
            )
        ) from error
    address, count, own, devices = found
    if known.local_device_ids is None:
        devices = _own_devices(devices)
    request = Request(address, count, own, as_device_ids(devices))
    described = read_tf_config() if method is None else None
    return request if described is None else request.filled_from(Request(*described, None))


def _own_devices(detected: Sequence[int] | None) -> Sequence[int] | None:
    """Returns which of this machine's GPUs are those of a process that JAX detected; None: all.

    JAX takes the one that has the number of the process on its machine, so a single process would
    leave all others idle, and one that the scheduler shows only its own would find none. Where the
    launcher has said which process this is, the scheduler started only the launcher.
    """
    names = ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID")
    if not detected or all(f"DISTJAX_{name}" in os.environ for name in names):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    num_visible = len(visible.split(",")) if visible else 0
    num_on_host = os.environ.get("SLURM_GPUS_ON_NODE", "")
    is_shown_its_own = num_on_host.isdecimal() and 0 < num_visible < int(num_on_host)
    return None if is_shown_its_own or _num_tasks_of_this_host() == 1 else detected


def _num_tasks_of_this_host() -> int | None:
    """Returns how many processes of this job Slurm or Open MPI started here; None: unknown."""
    by_node: list[int] = []  # Slurm writes "2(x3),1": two tasks on each of three nodes, one more
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE", os.environ.get("SLURM_TASKS_PER_NODE", ""))
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
        by_node += [int(count)] * int(repeat or 1)
    node, of_mpi = (os.environ.get(x, "") for x in ("SLURM_NODEID", "OMPI_COMM_WORLD_LOCAL_SIZE"))
    if of_mpi.isdecimal():
        return int(of_mpi)
    return by_node[int(node)] if node.isdecimal() and int(node) < len(by_node) else None


def _require_place(request: Request) -> None:
    """Raises unless `request` is a valid place in a job."""
    count, own = request.num_processes, request.process_id
    known = dataclasses.asdict(request)
    missing = [name for name in _PLACE if known[name] is None]
    if is_int(count) and count == 1 and own in (0, None):
        return  # alone, wherever the coordinator would be
    if missing:
        raise ClusterError(
            message(
                f"initialize needs {', '.join(_PLACE[:2])} and {_PLACE[2]}, or none of them",
                got=", ".join(f"{name}={known[name]!r}" for name in _PLACE),
                why=f"no argument, no variable DISTJAX_* and no cluster says {missing[0]}",
                fix="dj.initialize('10.0.0.1:1234', num_processes=2, process_id=0), and 1 in the "
                "other process",
            )
        )
    roll_call.split_address(request.coordinator_address, "coordinator_address")
    require(
        is_int(count) and is_int(own) and 0 <= own < count,
        "initialize needs a process_id from 0 up to num_processes - 1",
        got=f"num_processes={count!r}, process_id={own!r}",
        why="the processes of a job are numbered from 0, each number once",
        fix="dj.initialize(address, num_processes=2, process_id=0), and 1 in the other process",
        error=ClusterError,
    )


def read_tf_config() -> tuple[str, int, int] | None:
    """Returns (coordinator address, number of processes, process id), or None.

    The chief is process 0, followed by the workers; an evaluator is a separate program, as in
    tf.distribute.
    """
    text = os.environ.get("TF_CONFIG", "").strip()
    if text in ("", "{}"):
        return None
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        if not cluster or task.get("type") == "evaluator":
            return None
        return _find_task(cluster, str(task["type"]), int(task["index"]))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ClusterError(
            message(
                "TF_CONFIG needs to name a cluster of workers and which of them this process is",
                got=text if len(text) <= 300 else text[:297] + "...",
                why=f"it cannot be read ({type(error).__name__}: {error})",
                fix='{"cluster": {"worker": ["host-a:1234", "host-b:1234"]}, '
                '"task": {"type": "worker", "index": 0}}, or unset TF_CONFIG',
            )
        ) from None


def _find_task(cluster: dict[str, Any], kind: str, index: int) -> tuple[str, int, int]:
    chiefs = cluster.get("chief") or cluster.get("master") or []
    addresses = [*chiefs, *cluster.get("worker", [])]
    offset = {"chief": 0, "master": 0, "worker": len(chiefs)}[kind]
    length = len(addresses) - offset if kind == "worker" else len(chiefs)
    if not 0 <= index < length:
        raise LookupError(f"no task {index} of type {kind!r}")
    return str(addresses[0]), len(addresses), offset + index


# -- the first use of groups of devices ------------------------------------------
# When a group of devices is first used, gloo waits 30 seconds for its processes. That is too short
# if one process is at slow work (reading data, compiling), so the groups are used up front, while
# all processes are still together: those that every job has when it is joined, those in which a
# strategy reduces when it is created.

_used: set[frozenset[frozenset[jax.Device]]] = set()


def is_used(groups: np.ndarray) -> bool:
    """Returns whether `use` has had these groups before."""
    return frozenset(map(frozenset, groups.tolist())) in _used


def use(groups: np.ndarray) -> None:
    """Runs a collective in each group of devices [G, n], which connects its processes."""
    mesh = jax.sharding.Mesh(groups, ("groups", "devices"))
    split = NamedSharding(mesh, PartitionSpec("groups", "devices"))
    ones = jax.make_array_from_callback(groups.shape, split, lambda _: np.ones((1, 1), np.float32))
    totals = jax.jit(
        lambda x: x.sum(axis=1), out_shardings=NamedSharding(mesh, PartitionSpec("groups"))
    )
    totals(ones).block_until_ready()
    _used.add(frozenset(map(frozenset, groups.tolist())))


def _use_all() -> None:
    """Uses the groups that every job has: all devices, and one device per process."""
    devices = jax.devices()
    first = {device.process_index: device for device in reversed(devices)}
    use(np.array([devices]))
    use(np.array([[first[process] for process in sorted(first)]]))


# -- the devices of a job --------------------------------------------------------
# A strategy for all processes joins the job and needs devices of each process. What takes this
# process's devices only, although there are others, is told so once.

#: What Slurm and Open MPI tell the processes that they start: how many there are; and a variable
#: that only these have, not the script that starts them.
_LAUNCHERS = (("SLURM_NTASKS", "SLURM_STEP_NODELIST"), ("OMPI_COMM_WORLD_SIZE",) * 2)

_warned: set[str] = set()


# -- for all processes ----------------------------------------------------------


def join_for(strategy: str, devices: Sequence[jax.Device] | None) -> None:
    """Joins the job that the environment names, for a strategy over all processes.

    Raises a ValueError if its `devices` leave out a process of the job (None: it takes all), and a
    ClusterError if the job was joined without distjax.
    """
    if devices is None:
        join_if_nobody_did()
    elif not all(isinstance(d, jax.Device) for d in devices) or jax_compat.only_compiles(devices):
        return
    _require_own_job(strategy)
    if devices is not None:
        _require_every_process(devices, strategy)


def _require_own_job(strategy: str) -> None:
    require(
        jax.process_count() == 1 or job() is not None,
        f"{strategy} needs a job that dj.initialize has joined",
        got="a process of several that was initialized by jax.distributed.initialize alone",
        why="distjax compares what the processes do, which without it would train on wrong "
        "numbers in silence",
        fix="dj.initialize() in place of jax.distributed.initialize(), with the same arguments",
        error=ClusterError,
    )


def _require_every_process(devices: Sequence[jax.Device], strategy: str) -> None:
    present = {device.process_index for device in devices}
    missing = sorted(set(range(jax.process_count())) - present)
    require(
        not missing or not len(devices),
        f"{strategy}: devices needs devices of each of the {jax.process_count()} processes",
        got=f"{len(devices)} devices, none of process {', '.join(map(str, missing))}",
        why="every process launches the program, and one without a device cannot",
        fix=f"dj.{strategy}(), or devices=[d for d in jax.devices() if ...] with some of each "
        "process; on this process alone: dj.MirroredStrategy(jax.local_devices())",
    )


def warm_up_groups_of(topology: Topology, devices_per_host: int) -> None:
    """Runs a collective in each group of devices in which a strategy over the whole job reduces.

    New groups are first agreed on in a meeting.
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

    Also in a job that JAX's own `jax.distributed.initialize` has joined. `meant` says how a user
    says that this is meant.
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
    """Warns if the environment describes a job of several processes that nobody has joined."""
    if job() is not None or is_settled() or "unjoined" in _warned:
        return
    told = _told_by_environment()
    if told is None or jax_compat.coordination_client() is not None:
        return
    warn_once(
        "unjoined",
        message(
            f"{name} runs on this process alone, and the environment describes a job of several",
            got=f"{told}, and no call of dj.initialize",
            why="each process then trains a model of its own, on its own devices",
            fix="dj.initialize() at the start of the program, and dj.MultiWorkerMirroredStrategy() "
            "for one model over all processes; dj.initialize(num_processes=1, process_id=0) if "
            "this is meant",
        ),
    )


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


hooks.on_all_devices.append(join_for)
hooks.on_topology.append(warm_up_groups_of)
hooks.on_local_devices.append(warn_of_own_devices)
look_for_a_job()
