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
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distjax._src import jax_compat
from distjax._src.cluster import roll_call
from distjax._src.cluster.ending import watch_the_end
from distjax._src.cluster.events import record
from distjax._src.cluster.job import Job, Settings, Timeouts, set_job
from distjax._src.cluster.preemption import hold_notice
from distjax.errors import ClusterError, is_int, message

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
        _require_known(mtls)
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
    bind = settings.bind_address
    own_bind = bind if settings.process_id == 0 else None
    gloo_host = roll_call.collectives_host(settings.coordinator_address, own_bind)
    jax_compat.make_gloo_listen_at(gloo_host)
    timeouts = settings.timeouts
    with hold_notice():
        jax.distributed.initialize(
            settings.coordinator_address,
            settings.num_processes,
            settings.process_id,
            local_device_ids=settings.local_device_ids,
            coordinator_bind_address=bind
            or roll_call.join_address(roll_call.resolve_host(host, port), port),
            cluster_detection_method="deactivate",  # already done
            initialization_timeout=math.ceil(timeouts.initialization),
            heartbeat_timeout_seconds=math.ceil(timeouts.heartbeat),
            shutdown_timeout_seconds=math.ceil(timeouts.shutdown),
            **dict(settings.mtls),
        )


def _require_known(mtls: Mapping[str, object]) -> None:
    known = inspect.signature(jax.distributed.initialize).parameters
    names = [n for n in known if n.startswith("mtls_") or n == "verify_secure_credentials"]
    unknown = sorted(set(mtls) - set(names))
    if unknown:
        raise TypeError(
            message(
                "initialize needs options that it or JAX has",
                got=", ".join(unknown),
                why=f"JAX {jax.__version__} has {', '.join(names) or 'no options for mTLS'}",
                fix="leave it out, or install a JAX that has it",
            )
        )


def _require_equal(former: Settings, settings: Settings) -> None:
    if settings != former:
        raise ClusterError(
            message(
                "initialize needs equal arguments when it is called again",
                got=former.describe_difference(settings),
                why="a process joins one job, once, for as long as it lives",
                fix="call dj.initialize once, at the start of the program",
            )
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
    given = {
        "initialization_timeout": initialization,
        "heartbeat_timeout": heartbeat,
        "shutdown_timeout": shutdown,
        "step_deadline": step_deadline,
        "meeting_timeout": 60.0 if meeting is None else meeting,
        "phase_timeout": phase,
    }
    for name, value in given.items():
        is_number = is_int(value) or isinstance(value, float)
        if not (is_number and 0 < value <= _MAX_SECONDS):
            raise ClusterError(
                message(
                    f"{name} of initialize needs to be a number of seconds, up to {_MAX_SECONDS}",
                    got=repr(value),
                    why="every wait of a job ends, and this is how long it may be",
                    fix=f"dj.initialize(..., {name}=60)",
                )
            )
    if meeting is None:
        meeting = min(step_deadline, 60.0)
    return Timeouts(initialization, heartbeat, shutdown, step_deadline, meeting, phase)


def as_device_ids(ids: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Returns `ids` as a tuple, or None for all devices."""
    if ids is None:
        return None
    found = (ids,) if isinstance(ids, (int, str)) else tuple(ids)
    if not all(is_int(i) and i >= 0 for i in found):
        raise ClusterError(
            message(
                "local_device_ids of initialize needs to be a number, or several",
                got=repr(ids),
                why="they say which of this machine's GPUs are those of this process",
                fix="dj.initialize(..., local_device_ids=[0, 1])",
            )
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
    timeout = math.ceil(timeouts.initialization)
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
    if not (is_int(count) and is_int(own) and 0 <= own < count):
        raise ClusterError(
            message(
                "initialize needs a process_id from 0 up to num_processes - 1",
                got=f"num_processes={count!r}, process_id={own!r}",
                why="the processes of a job are numbered from 0, each number once",
                fix="dj.initialize(address, num_processes=2, process_id=0), and 1 in the other "
                "process",
            )
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
