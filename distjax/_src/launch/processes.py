"""The processes of one attempt on this machine: started, read, signalled, and none left behind.

Each is the leader of a process group of its own, so that a Ctrl-C at the terminal reaches only the
launcher, and all that a process has started can be killed with it. One thread per process copies
what it says to its log, and by lines to the launcher's output. Another waits for its end. The main
thread takes ends and signals from one queue.

If the launcher is killed, a *guard* kills the groups on its list: a process that holds the other
end of a pipe of the launcher's, which closes with it on every system. (Linux could kill the
launcher's children, but not what these have started; macOS has no such signal.)
"""

from __future__ import annotations

import contextlib
import io
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

#: It reads "+7" when the group of process 7 has begun, "-7" at its end, and the launcher's end.
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
groups = set()
for line in sys.stdin.buffer:
    (groups.add if line[:1] == b"+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""
#: How long to read on after a process has ended: what it started may hold its output open.
_READ_SECONDS = 5.0
#: A line that is longer is shown in parts.
_MAX_LINE = 1 << 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: States of a process, in /proc, that answers nobody.
FROZEN = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk"}


class Ended(NamedTuple):
    """The end of a process: its code as in a shell, 128 + n after signal n.

    The state is what it was doing when this launcher killed it; "": it has ended by itself.
    """

    process: int
    code: int
    state: str = ""


class Processes:
    """The processes of one attempt; none is left behind the ``with`` of it.

    Args:
      show: is called with (process, line), in several threads.
      events: where their ends are put.
    """

    def __init__(self, show: Callable[[int, bytes], None], events: queue.SimpleQueue[Ended | int]):
        self._show, self._events, null = show, events, subprocess.DEVNULL
        guard = [sys.executable, "-I", "-S", "-c", _GUARD]
        self._guard = subprocess.Popen(
            guard, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
        )
        self._all: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._states: dict[int, str] = {}  # of those that were killed

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for thread in self._threads:
            thread.join(_READ_SECONDS)
        self._guard.communicate()

    def start(
        self, process: int, command: Sequence[str], environment: Mapping[str, str], log: str
    ) -> int:
        """Starts the process of an id, whose output also goes to a file; returns its pid."""
        file = open(log, "wb", buffering=0)
        self._all[process] = started = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._tell_guard("+", started.pid)
        for target, args in ((self._read, (process, file)), (self._wait, (process,))):
            self._threads.append(threading.Thread(target=target, args=args, daemon=True))
            self._threads[-1].start()
        return started.pid

    def signal(self, number: int) -> None:
        """Sends a signal to each that runs; not to what it has started, which it looks after."""
        for started in self._all.values():
            started.send_signal(number)

    def kill(self) -> None:
        """Kills all processes and what they have started."""
        for process, started in self._all.items():
            if started.returncode is None:
                self._states.setdefault(process, _state_of(started.pid))
            self._kill_group(started.pid)

    def _kill_group(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone
            os.killpg(pid, signal.SIGKILL)

    def _tell_guard(self, sign: str, pid: int) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # it was killed
            os.write(self._guard.stdin.fileno(), f"{sign}{pid}\n".encode())

    def _wait(self, process: int) -> None:
        started = self._all[process]
        code = started.wait()
        self._kill_group(started.pid)  # what it has left running
        self._tell_guard("-", started.pid)
        state = self._states.get(process, "") if code < 0 else ""  # it was about to end by itself
        self._events.put(Ended(process, as_in_a_shell(code), state))

    def _read(self, process: int, log: BinaryIO) -> None:
        pipe, rest = self._all[process].stdout, b""
        assert isinstance(pipe, io.BufferedReader)
        with pipe, log:
            while said := pipe.read1():  # as soon as it is said: a hung process may be in a line
                with contextlib.suppress(OSError):  # a full disk must not stop the process
                    log.write(said)
                *lines, rest = (rest + said).split(b"\n")
                if len(rest) > _MAX_LINE:
                    lines, rest = [*lines, rest], b""
                for line in lines:
                    self._show(process, line)
            if rest:
                self._show(process, rest)


def _state_of(pid: int) -> str:
    """Returns what a process is doing, as far as the system says."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        return FROZEN.get(file.read().rpartition(")")[2].split()[0], "running")
    return "running"


def as_in_a_shell(code: int) -> int:
    """Returns an exit code: 128 + n after signal n."""
    return 128 - code if code < 0 else code


def output() -> Callable[[int, bytes], None]:
    """Returns what writes to stdout, from any thread, a line of a process, behind its id."""
    lock, file = threading.Lock(), sys.stdout.fileno()
    os.set_blocking(file, True)  # else what does not fit into a pipe is lost

    def show(process: int, line: bytes) -> None:
        whole = b"[%d] %b\n" % (process, line)
        with lock, contextlib.suppress(OSError):  # nobody reads any more: the logs have all of it
            while whole:
                whole = whole[os.write(file, whole) :]

    return show


@contextlib.contextmanager
def signals_to(events: queue.SimpleQueue[Ended | int]) -> Generator[None]:
    """A context in which SIGINT, SIGTERM and SIGHUP are put into a queue, by number."""
    numbers = [n for n in _SIGNALS if signal.getsignal(n) != signal.SIG_IGN]  # `nohup` means it
    former = {n: signal.signal(n, lambda number, _: events.put(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def be_init(argv: Sequence[str]) -> int:
    """Runs `distjax` with these arguments as a child of this process 1; returns its exit code.

    Process 1 reaps what nobody else waits for.
    """
    # In a group of its own, else it would hear a Ctrl-C twice: from the terminal, too.
    child = subprocess.Popen([sys.executable, "-m", "distjax", *argv], process_group=0)
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: child.send_signal(number))
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return as_in_a_shell(os.waitstatus_to_exitcode(status))
