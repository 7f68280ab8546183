"""Starts trainings that are to be killed: forks of one process that has imported everything.

Imports are half of what a short run costs. The process that is forked has no backend and no job,
and its fork runs to the end as the main program that it is: hooks, exit code and all.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from tests.processes.jobs import ROOT, job_environment

_MAX_REQUEST = 1 << 16
_one_at_a_time = threading.Lock()


class Forked:
    """A process that was started here: what is used of `subprocess.Popen`.

    Args:
      pid: its number.
      starter: whose child it is.
    """

    def __init__(self, pid: int, starter: Starter):
        self.pid, self.returncode = pid, None
        self._starter, self._end = starter, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._wait(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, when it has ended.

        Raises:
          TimeoutExpired: it runs on.
        """
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it runs."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._end, number)

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._end], [], [], timeout)[0]:
            self.returncode = self._starter.ask({"reap": self.pid})
            os.close(self._end)
        return self.returncode


class Starter:
    """The process that is forked."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.drills.warm", str(theirs.fileno())]
            environment = job_environment(1) | {"OPENBLAS_NUM_THREADS": "1"}  # no thread to fork
            fds = (theirs.fileno(),)
            subprocess.Popen(command, pass_fds=fds, cwd=ROOT, env=environment)

    def start(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        settings: Mapping[str, object],
        files: Sequence[int],
    ) -> Forked:
        """Starts a training.

        Args:
          arguments: of its command line.
          environment: what is added to its variables.
          settings: what is set in `jax.config`.
          files: numbers of those that are its stdout and stderr.
        """
        request = {"arguments": arguments, "environment": environment, "settings": settings}
        return Forked(self.ask(request, files), self)

    def ask(self, request: Mapping[str, object], files: Sequence[int] = ()) -> int:
        """Sends a request, and returns the answer to it."""
        with self._one_at_a_time:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            return int(self._socket.recv(_MAX_REQUEST))


@functools.cache
def _starter() -> Starter:
    return Starter()


def starter() -> Starter:
    """The one of this process, which ends when this process does."""
    with _one_at_a_time:
        return _starter()


def _serve(asked: socket.socket) -> dict[str, Any]:
    """Answers requests; returns in each fork, with what it was asked to be."""
    while True:
        said, files, *_ = socket.recv_fds(asked, _MAX_REQUEST, 2)
        if not said:
            os._exit(0)
        request = json.loads(said)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            os.dup2(files[0], 1)
            os.dup2(files[1], 2)
        for file in files:
            os.close(file)
        if pid == 0:
            return request
        asked.send(str(pid).encode())


def main() -> None:
    """Forks, and is a training in each fork."""
    import jax

    from tests.drills import training

    with socket.socket(fileno=int(sys.argv[1])) as asked:
        request = _serve(asked)
    os.environ.update(request["environment"])
    for name, value in request["settings"].items():
        jax.config.update(name, value)
    sys.argv[1:] = request["arguments"]
    training.main()


if __name__ == "__main__":
    main()
