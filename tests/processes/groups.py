"""Groups of real processes, each with devices of its own, that call functions side by side.

A group is one job. It serves one test after the other, since starting costs seconds; after any
failure it is ended, as its processes may wait for each other, and the next test gets a new one.
One group is alive at a time in one test worker.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.processes.jobs import free_address, kill_all
from tests.processes.warm import starter

_SERVE = "tests.processes.worker:serve"


class GroupFailure(AssertionError):
    """A process of the group raised, died or did not answer: what each of them said."""


class Group:
    """P processes of D devices.

    Args:
      num_processes: P.
      devices: D, of each process.
      modules: what they have imported when they start; none: everything.
    """

    def __init__(self, num_processes: int, devices: int, modules: Sequence[str] = ()):
        address = free_address()
        self._connections, self._processes = [], []
        for process_id in range(num_processes):
            ours, theirs = multiprocessing.Pipe()
            with theirs:
                arguments = address, num_processes, process_id, devices
                files = 1, 2, theirs.fileno()
                process = starter(*modules).call(_SERVE, arguments, files)
            self._connections.append(ours)
            self._processes.append(process)
        self._receive(120.0)

    def call(self, fn: Callable[..., Any], *args: Any, seconds: float = 120.0) -> list[Any]:
        """Returns ``fn(*args)`` of each process, by its number; all call it at once.

        Raises:
          GroupFailure: one raised, died, or did not answer in time; the group is ended.
        """
        for connection in self._connections:
            connection.send((fn, args))
        return self._receive(seconds)

    def _receive(self, seconds: float) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + seconds
        waiting = dict(zip(self._connections, range(len(self._connections)), strict=True))
        while waiting:
            remaining = deadline - time.monotonic()
            ready = multiprocessing.connection.wait(list(waiting), max(remaining, 0))
            if not ready:
                break
            for connection in ready:
                process_id = waiting.pop(connection)
                try:
                    answers[process_id] = connection.recv()
                except (EOFError, ConnectionError):
                    answers[process_id] = ("died", self._exit_code(process_id))
            if any(kind != "result" for kind, _ in answers.values()):
                # The others may wait for the one that failed: a moment for their own errors.
                deadline = min(deadline, time.monotonic() + 2.0)
        silent = dict.fromkeys(waiting.values(), ("silent", f"for {seconds:.0f} s"))
        answers.update(silent)
        if all(kind == "result" for kind, _ in answers.values()):
            return [answers[process_id][1] for process_id in range(len(self._processes))]
        self.end()
        said = "\n".join(f"-- process {p}: {kind}\n{text}" for p, (kind, text) in answers.items())
        raise GroupFailure(said)

    def _exit_code(self, process_id: int) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._processes[process_id].wait(5)
        return None

    def end(self) -> None:
        """Kills every process, and waits until it is gone."""
        kill_all(self._processes)
        for connection in self._connections:
            connection.close()

    @property
    def is_alive(self) -> bool:
        """Whether every process runs."""
        return all(process.poll() is None for process in self._processes)


_alive: dict[tuple[int, int], Group] = {}


def group(num_processes: int, devices: int) -> Group:
    """Returns the group of this shape, started if it is not there; one of another shape ends."""
    shape = num_processes, devices
    found = _alive.get(shape)
    if found is None or not found.is_alive:
        end_groups()
        found = _alive[shape] = Group(num_processes, devices)
    return found


def end_groups() -> None:
    """Ends the group that is alive, if there is one."""
    for found in _alive.values():
        with contextlib.suppress(OSError):
            found.end()
    _alive.clear()


atexit.register(end_groups)
