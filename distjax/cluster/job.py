"""The job that this process has joined: what other modules ask for.

`initialize` joins, and says so here. A program of one process has no job, and pays nothing for
those of several: whoever compares processes asks ``job()`` first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


class CoordinationClient(Protocol):
    """What this process says to the others, without a device: JAX's coordination service.

    Times are milliseconds. A wait that ends without what it waited for raises
    `jax.errors.JaxRuntimeError`. All that is read here was written by another process: it
    is text, to be parsed, never executed.
    """

    def wait_at_barrier(
        self, barrier_id: str, timeout_in_ms: int, process_ids: Sequence[int] | None = None
    ) -> None:
        """Returns when all processes (or those named) wait here; each id serves once."""
        ...

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns the keys under ``key/`` and their values; full names, in any order."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Removes a key, or all under ``key/``."""
        ...


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long this job waits, in seconds.

    Attributes:
      initialization: for all processes to come.
      heartbeat: without a sign of life until a process is taken for dead.
      shutdown: for all processes to come to their end.
      step_deadline: from the launch of a program to its completion.
      meeting: for all processes to come where they compare what they do.
      phase: for slow work of one process (compiling, data, checkpoints), and for all to come where
        it reads data or looks at a checkpoint.
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
      client: what it says to the others.
      timeouts: how long it waits for them.
      hosts: "host (pid N)" of each process, by id, for errors.
      attempt: how often the job was started again.
    """

    process_id: int
    num_processes: int
    client: CoordinationClient
    timeouts: Timeouts
    hosts: tuple[str, ...]
    attempt: int

    def name_process(self, process_id: int) -> str:
        """Returns "process 1 on host-b (pid 4711)"."""
        return f"process {process_id} on {self.hosts[process_id]}"


_joined: list[Job] = []


def job() -> Job | None:
    """Returns the job that this process has joined; None: it is a program of its own."""
    return _joined[0] if _joined else None


def set_job(joined: Job) -> None:
    """Says that this process has joined a job, which it does once."""
    _joined[:] = [joined]
