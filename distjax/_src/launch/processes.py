"""The processes of one attempt on this machine: started, read, signalled, and none left behind.

Each is the leader of a process group of its own, so that a Ctrl-C at the terminal reaches only the
launcher, and all that a process has started can be killed with it. One thread per process copies
what it says, byte by byte, to its log, and line by line to the launcher's output. Another waits for
its end. The main thread takes ends and signals from one queue.

If the launcher is killed, a *guard* kills the groups: a process that holds the other end of a pipe
of the launcher's, to which every process has said its number before it became the user's program.
On Linux the kernel kills the processes, too (PR_SET_PDEATHSIG), even if the guard is killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

#: What each process is before it becomes the user's program. It adds its number to the guard's
#: list; PR_SET_PDEATHSIG is 1.
_START = """
import os, signal, sys
file, parent = int(sys.argv[1]), int(sys.argv[2])
os.write(file, b"+%d\\n" % os.getpid())
os.close(file)
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
except (ImportError, OSError, AttributeError):
    pass
if os.getppid() != parent:
    os._exit(137)
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.exit(f"{sys.argv[3]}: {error}")
"""

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
#: Without site packages and the user's variables: each takes 20 ms.
_PYTHON = (sys.executable, "-I", "-S", "-c")
#: How long to read on after a process has ended: what it started may hold its output open.
_READ_SECONDS = 5.0
#: A line that is longer is shown in parts.
_MAX_LINE = 1 << 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_guard() -> subprocess.Popen[bytes]:
    """Starts what kills the groups on its list when this process ends, in whatever way.

    As a context, it ends, and kills what is still on its list.
    """
    null = subprocess.DEVNULL
    command = [*_PYTHON, _GUARD]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True
    )


class Ended(NamedTuple):
    """The end of a process: its exit code as in a shell, 128 + n after signal n."""

    place: int
    code: int
    was_killed: bool  # by this launcher


class Processes:
    """The processes of one attempt.

    Args:
      command: of each.
      environments: the variables of each.
      logs: the path of each one's log.
      guard: which kills them if this process is killed.
      show: is called with (index, line), in several threads.
      events: where their ends are put, as `Ended`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        logs: Sequence[str],
        guard: subprocess.Popen[bytes],
        show: Callable[[int, bytes], None],
        events: queue.SimpleQueue[Ended | int],
    ):
        assert guard.stdin is not None
        self._list, self._show, self._events = guard.stdin.fileno(), show, events
        self._processes: list[subprocess.Popen[bytes]] = []
        self._readers: list[threading.Thread] = []
        self._killed: set[int] = set()
        start = [*_PYTHON, _START, str(self._list), str(os.getpid()), *command]
        try:
            for index, (environment, log) in enumerate(zip(environments, logs, strict=True)):
                file = open(log, "wb")
                process = subprocess.Popen(
                    start,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(self._list,),
                )
                self._processes.append(process)
                reader = threading.Thread(target=self._read, args=(index, file), daemon=True)
                self._readers.append(reader)
                reader.start()
                threading.Thread(target=self._wait, args=(index,), daemon=True).start()
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """The operating system's number of each process."""
        return [process.pid for process in self._processes]

    def running(self) -> list[int]:
        """Returns the indices of those that have not ended."""
        return [i for i, process in enumerate(self._processes) if process.returncode is None]

    def signal(self, number: int) -> None:
        """Sends a signal to each that runs; not to what it has started, which it looks after."""
        for i in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[i].pid, number)

    def kill(self) -> None:
        """Kills all processes and what they have started."""
        for i in range(len(self._processes)):
            self._kill_group(i)

    def _kill_group(self, index: int) -> None:
        process = self._processes[index]
        if process.returncode is None:
            self._killed.add(index)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone
            os.killpg(process.pid, signal.SIGKILL)

    def finish_reading(self) -> None:
        """Waits until all that the processes have said, is read."""
        deadline = time.monotonic() + _READ_SECONDS
        for reader in self._readers:
            reader.join(max(deadline - time.monotonic(), 0))

    def _wait(self, index: int) -> None:
        process = self._processes[index]
        code = process.wait()
        self._kill_group(index)  # what it has left running
        with contextlib.suppress(OSError):  # the guard was killed
            os.write(self._list, b"-%d\n" % process.pid)
        was_killed = index in self._killed and code < 0  # else it was about to end by itself
        self._events.put(Ended(index, as_in_a_shell(code), was_killed))

    def _read(self, index: int, log: BinaryIO) -> None:
        pipe = self._processes[index].stdout
        assert pipe is not None
        held = b""
        with pipe, log:
            while part := os.read(pipe.fileno(), 1 << 16):
                with contextlib.suppress(OSError):  # a full disk must not stop the process
                    log.write(part)
                    log.flush()
                *lines, held = (held + part).split(b"\n")
                if len(held) > _MAX_LINE:
                    lines, held = [*lines, held], b""
                for line in lines:
                    self._show(index, line)
            if held:
                self._show(index, held)


def as_in_a_shell(code: int) -> int:
    """Returns an exit code: 128 + n after signal n."""
    return 128 - code if code < 0 else code


def output(first: int) -> Callable[[int, bytes], None]:
    """Returns what writes to stdout, from any thread, a line of a process, behind its number.

    Args:
      first: the id of the first process of this machine.
    """
    lock, is_open = threading.Lock(), True

    def show(index: int, line: bytes) -> None:
        nonlocal is_open
        whole, file = b"[%d] %b\n" % (first + index, line), sys.stdout.fileno()
        with lock:
            while whole and is_open:
                try:
                    whole = whole[os.write(file, whole) :]
                except BlockingIOError:  # somebody has made the terminal non-blocking
                    time.sleep(0.001)
                except OSError:  # nobody reads any more: the logs have all of it
                    is_open = False

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
    child = subprocess.Popen([sys.executable, "-m", "distjax", *argv])
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: child.send_signal(number))
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return as_in_a_shell(os.waitstatus_to_exitcode(status))
