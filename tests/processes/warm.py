"""Processes that start fast: forks of one process that has imported everything.

Imports are half of what a short run costs. The process that is forked has no backend, no job and
no second thread. A fork runs to the end as the main program that it is: hooks, exit code and all.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[2]

#: What tests and examples import.
EVERYTHING = (
    *("distjax", "optax", "flax.linen", "flax.nnx", "orbax.checkpoint"),
    *("sklearn.datasets", "matplotlib.figure"),
)
_MAX_REQUEST, _MAX_FILES = 1 << 16, 3
_one_at_a_time = threading.Lock()


def outside_of_jobs() -> dict[str, str]:
    """Returns our variables without those of a job, for processes that import what is here."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("DISTJAX_", "TF_CONFIG"))}
    return ours | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}


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
    """The process that is forked.

    Args:
      modules: what it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._one_at_a_time = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            name = "tests.processes.warm"
            command = [sys.executable, "-m", name, str(theirs.fileno()), *modules]
            environment = outside_of_jobs() | {"OPENBLAS_NUM_THREADS": "1"}  # no thread to fork
            subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
            )

    def start(
        self,
        script: os.PathLike[str] | str,
        arguments: Sequence[str] = (),
        *,
        environment: Mapping[str, str],
        settings: Mapping[str, object],
        files: Sequence[int],
    ) -> Forked:
        """Starts a script.

        Args:
          script: where it is.
          arguments: of its command line.
          environment: its variables.
          settings: what is set in `jax.config`, which has read its variables before.
          files: numbers of those that are its stdout and stderr.
        """
        what = {"script": str(script), "arguments": arguments}
        what |= {"environment": dict(environment), "settings": settings}
        return Forked(self.ask(what, files), self)

    def call(self, function: str, arguments: Sequence[object], files: Sequence[int]) -> Forked:
        """Calls a function in a process of its own.

        Args:
          function: as "module:name"; its first argument is the number of the third file.
          arguments: the others.
          files: numbers of those that are its stdout and stderr, and of one more.
        """
        what = {"function": function, "arguments": arguments}
        what |= {"environment": dict(os.environ), "settings": {}}
        return Forked(self.ask(what, files), self)

    def ask(self, request: Mapping[str, object], files: Sequence[int] = ()) -> int:
        """Sends a request, and returns the answer to it."""
        with self._one_at_a_time:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            return int(self._socket.recv(_MAX_REQUEST))


@functools.cache
def _starter(modules: tuple[str, ...]) -> Starter:
    return Starter(modules)


def starter(*modules: str) -> Starter:
    """The one that has imported these modules (none: everything); it ends with this process."""
    with _one_at_a_time:
        return _starter(modules or EVERYTHING)


# -- in the process that is forked, and in its forks ------------------------------


class _Asked(NamedTuple):
    request: dict[str, Any]
    files: list[int]


def _serve(asked: socket.socket) -> _Asked:
    """Answers requests; returns in each fork, with what it was asked to be."""
    while True:
        said, files, *_ = socket.recv_fds(asked, _MAX_REQUEST, _MAX_FILES)
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
            for file in files[:2]:
                os.close(file)
            return _Asked(request, files[2:])
        for file in files:
            os.close(file)
        asked.send(str(pid).encode())


def _be_the_script(path: str, arguments: Sequence[str]) -> None:
    """Does what `python path arguments` does once it has started."""
    sys.argv, sys.path[0] = [path, *arguments], os.path.dirname(path)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = path
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    exec(code, main.__dict__)


def main() -> None:
    """Forks, and is a script or a call in each fork."""
    import jax

    for name in sys.argv[2:]:
        with contextlib.suppress(ImportError):  # of an extra
            importlib.import_module(name)
    gc.freeze()  # what all forks share is not looked at again
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        request, files = _serve(asked)
    os.environ.clear()
    os.environ.update(request["environment"])
    for name, value in request["settings"].items():
        jax.config.update(name, value)
    if "script" in request:
        _be_the_script(request["script"], request["arguments"])
    else:
        module, _, name = request["function"].partition(":")
        getattr(importlib.import_module(module), name)(*files, *request["arguments"])


if __name__ == "__main__":
    main()
