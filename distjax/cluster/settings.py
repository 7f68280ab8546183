"""What a process is told about its job: by arguments, environment and cluster."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from distjax import jax_compat
from distjax.cluster.addresses import split_address
from distjax.cluster.job import Timeouts
from distjax.cluster.tf_config import read_tf_config
from distjax.errors import ClusterError, message
from distjax.integers import is_int


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `initialize` was told or found out.

    Attributes:
      coordinator_address: "host:port" of process 0; None in a single-process program.
      num_processes: the number of processes.
      process_id: the index of this one.
      local_device_ids: the devices that this process uses; None: all it has.
      bind_address: where the coordinator was asked to listen, or None.
      timeouts: how long the job waits.
      attempt: how many times the job was restarted.
      mtls: JAX's options for encrypted connections to the coordinator, sorted by name.
    """

    coordinator_address: str | None
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None
    bind_address: str | None
    timeouts: Timeouts
    attempt: int
    mtls: tuple[tuple[str, Any], ...]

    def describe_difference(self, other: Settings) -> str:
        """Returns "process_id=1, which was 0" for each argument that differs in `other`."""
        mine, its = self._as_arguments(), other._as_arguments()
        names = [name for name in {**mine, **its} if mine.get(name) != its.get(name)]
        return "; ".join(f"{n}={its.get(n)!r}, which was {mine.get(n)!r}" for n in names)

    def _as_arguments(self) -> dict[str, object]:
        """Returns the fields under their names as arguments of `initialize`."""
        fields = {**vars(self), **dict(self.mtls)}
        fields["coordinator_bind_address"] = fields.pop("bind_address")
        for name, seconds in vars(self.timeouts).items():
            fields[name if name == "step_deadline" else f"{name}_timeout"] = seconds
        del fields["timeouts"], fields["mtls"]
        return fields


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
    request = Request(address, count, own, as_device_ids(devices))
    described = read_tf_config() if method is None else None
    return request if described is None else request.filled_from(Request(*described, None))


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
    split_address(request.coordinator_address, "coordinator_address")
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
