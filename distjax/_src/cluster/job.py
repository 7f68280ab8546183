"""The job that this process has joined; lines between processes, and to the launcher.

`initialize` joins and records it here. Only then do the modules that compare processes listen to
the kernel (`on_joined`), so a program of one process passes none of them; others ask ``job()``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class CoordinationClient(Protocol):
    """JAX's coordination service: how processes communicate without devices.

    Timeouts are in milliseconds; a wait that times out raises `jax.errors.JaxRuntimeError`.
    Everything read here was written by another process: it is text to be parsed, never executed.
    """

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns the (full name, value) pairs under ``key/``, in any order."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Deletes a key, or everything under ``key/``."""
        ...


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long this job waits, in seconds: arguments of `initialize`.

    Attributes:
      initialization_timeout: for all processes to join.
      heartbeat_timeout: without a heartbeat until a process is considered dead.
      shutdown_timeout: for all processes to reach their end.
      step_deadline: from the launch of a program to its completion, and for all to arrive where
        they take a batch or look at a checkpoint.
      meeting_timeout: for all processes to arrive where they compare what they do.
      phase_timeout: for slow work of one process (compiling, data, checkpoints).
    """

    initialization_timeout: float
    heartbeat_timeout: float
    shutdown_timeout: float
    step_deadline: float
    meeting_timeout: float
    phase_timeout: float


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `initialize` was told or found out.

    Attributes:
      coordinator_address: "host:port" of process 0; None in a single-process program.
      num_processes: the number of processes.
      process_id: the index of this one.
      local_device_ids: the devices that this process uses; None: all it has.
      coordinator_bind_address: where the coordinator was asked to listen, or None.
      timeouts: how long the job waits.
      attempt: how many times the job was restarted.
      mtls: JAX's options for encrypted connections to the coordinator, sorted by name.
    """

    coordinator_address: str | None
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None
    coordinator_bind_address: str | None
    timeouts: Timeouts
    attempt: int
    mtls: tuple[tuple[str, Any], ...]

    def describe_difference(self, other: Settings) -> str:
        """Returns "process_id=1, which was 0" for each argument that differs in `other`."""
        mine, its = ({**vars(x), **vars(x.timeouts), **dict(x.mtls)} for x in (self, other))
        names = [n for n in {**mine, **its} if n not in ("timeouts", "mtls")]
        differ = [n for n in names if mine.get(n) != its.get(n)]
        return "; ".join(f"{n}={its.get(n)!r}, which was {mine.get(n)!r}" for n in differ)


@dataclasses.dataclass(frozen=True)
class Job:
    """The job of this process.

    Attributes:
      process_id: this process, from 0 to `num_processes` - 1.
      num_processes: two or more.
      client: the coordination service.
      timeouts: how long to wait for other processes.
      hosts: "host (pid N)" of each process, by id, for errors.
    """

    process_id: int
    num_processes: int
    client: CoordinationClient
    timeouts: Timeouts
    hosts: tuple[str, ...]

    def name_process(self, process_id: int) -> str:
        """Returns "process 1 on host-b (pid 4711)"."""
        return f"process {process_id} on {self.hosts[process_id]}"


_joined: list[Job] = []
#: Called once this process has joined a job: they register with the kernel's events.
on_joined: list[Callable[[], None]] = []


def job() -> Job | None:
    """Returns the job that this process has joined; None in a single-process program."""
    return _joined[0] if _joined else None


def set_job(joined: Job) -> None:
    """Records that this process has joined a job; called once."""
    _joined[:] = [joined]
    for listen in on_joined:
        listen()


# -- lines that processes send each other: bounded in size, never executed -------


def as_line(content: dict[str, Any]) -> str:
    """Returns `content` as a line."""
    return json.dumps(content) + "\n"


def parse_line(line: str | bytes) -> dict[str, Any]:
    """Returns the content of a line; empty if it is not a JSON object."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def as_plain(text: object, max_length: int = 64) -> str:
    """Returns foreign text made printable: no control characters, truncated."""
    plain = "".join(c if c.isprintable() or c == "\n" else "?" for c in str(text))
    return plain if len(plain) <= max_length else plain[: max_length - 3] + "..."


# -- what a process tells the launcher -------------------------------------------
# A launcher sets DISTJAX_RESULT_DIR; without it nothing is written. All processes of a machine
# append lines of JSON to one file there, each in one write, which the operating system does not mix
# with others.

FILE = "events.jsonl"
_MAX_TEXT = 8000
#: The step that the loop of this process is in, as far as it says so.
_step: list[int] = []


def record(event: str, **facts: object) -> None:
    """Appends an event of this process ("joined", "failed") to the result directory, if any."""
    directory = os.environ.get("DISTJAX_RESULT_DIR")
    if not directory:
        return
    joined, text = job(), os.environ.get("DISTJAX_PROCESS_ID", "")
    own = joined.process_id if joined is not None else int(text) if text.isdecimal() else 0
    append(directory, event, current_attempt(), own, **facts)


def current_attempt() -> int:
    """Returns how many times a launcher has started the job before; 0 without one."""
    text = os.environ.get("DISTJAX_ATTEMPT", "")
    return int(text) if text.isdecimal() else 0


def append(
    directory: str, event: str, attempt: int, process: int | None = None, **facts: object
) -> None:
    """Appends an event to the file in a directory, in one write, if there is room.

    `code` and `step` are among the facts too, as None if not given; process None: the launcher.
    """
    line = {"time": time.time(), "attempt": attempt, "event": event, "process": process}
    line |= {"code": None, "step": None, **facts}
    flags, whole = os.O_WRONLY | os.O_APPEND | os.O_CREAT, as_line(line).encode()
    with contextlib.suppress(OSError):  # a full disk must not hide what is told, nor end the job
        file = os.open(os.path.join(directory, FILE), flags, 0o644)
        try:
            written = os.write(file, whole)
            end = os.lseek(file, 0, os.SEEK_CUR)
            if written < len(whole) and os.fstat(file).st_size == end:
                os.ftruncate(file, end - written)  # the disk is full: the next line begins one
        finally:
            os.close(file)


def set_step(step: int) -> None:
    """Records the step that this process is in, for what is told when it fails."""
    _step[:] = [step]


def record_failure(code: int, text: str, error: BaseException | None = None) -> None:
    """Records why this process is about to end: its exit code, the error's type and text."""
    trace = "" if error is None else "".join(traceback.format_exception(error))
    step = _step[0] if _step else None
    told = {"error": as_plain(text, _MAX_TEXT), "traceback": trace[-_MAX_TEXT:]}
    record("failed", code=code, step=step, **told)
