"""The job that this process has joined.

`initialize` joins and records it here. A single-process program has no job and pays nothing for
multi-process support: code that compares processes checks ``job()`` first.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol


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
    """How long this job waits, in seconds.

    Attributes:
      initialization: for all processes to join.
      heartbeat: without a heartbeat until a process is considered dead.
      shutdown: for all processes to reach their end.
      step_deadline: from the launch of a program to its completion, and for all to arrive where
        they take a batch or look at a checkpoint.
      meeting: for all processes to arrive where they compare what they do.
      phase: for slow work of one process (compiling, data, checkpoints).
    """

    initialization: float
    heartbeat: float
    shutdown: float
    step_deadline: float
    meeting: float
    phase: float


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


def job() -> Job | None:
    """Returns the job that this process has joined; None in a single-process program."""
    return _joined[0] if _joined else None


def set_job(joined: Job) -> None:
    """Records that this process has joined a job; called once."""
    _joined[:] = [joined]
