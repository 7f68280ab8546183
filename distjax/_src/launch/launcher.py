"""`distjax launch`: starts the processes of a job on this machine, again where that may help.

One attempt is one set of processes. When the first of them fails, the others are killed, as none
can go on without it; what failed first is found from what the processes have recorded
(`events.jsonl`), their exit codes and their logs, and is told before anything else. Then comes the
next attempt, on a new port. There is no service between machines: each has its launcher, whose
processes end when those of another do; the roll call of the next attempt compares its number.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import queue
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn

from distjax._src.cluster.job import FILE, append
from distjax._src.cluster.roll_call import resolve_host, split_address
from distjax._src.launch.processes import Ended, Processes, output, signals_to, start_guard
from distjax.errors import ClusterError, as_part, message

UNCAUGHT, PEER_LOST, PREEMPTED, STUCK, DIFFERENT, CANNOT_START = 70, 71, 75, 76, 77, 78
_ABORTED = 128 + signal.SIGABRT
#: What an exit code means; the first four are those after which another attempt may help.
_MEANINGS = {
    UNCAUGHT: "an exception that nobody caught",
    PEER_LOST: "another process was lost",
    STUCK: "a process is stuck",
    137: "killed, as the system does when memory runs out",
    PREEMPTED: "told to stop, and saved",
    DIFFERENT: "processes do different things",
    CANNOT_START: "the job cannot start so",
    _ABORTED: "aborted, as JAX does when another process is lost",
}
#: How long the others may take to end by themselves after one has, by its code; else they are
#: killed at once. After these codes they are about to say why; one of them may be the cause.
_FOLLOW_SECONDS = {PEER_LOST: 2.0, STUCK: 2.0, DIFFERENT: 2.0, _ABORTED: 2.0}
_UNJOINED_SECONDS = 5.0
_LOOK_SECONDS = 0.2
#: More relaunches after preemptions without a new step are a loop.
_MAX_PREEMPTIONS, _MAX_PORTS = 100, 3
#: Below what systems give to outgoing connections, so that none of those takes it.
_PORTS = range(15_000, 32_000)
_TAIL_BYTES = 1 << 16
#: States of a process, in /proc, that answers nobody.
_FROZEN = {"T": "stopped", "t": "stopped by a debugger", "D": "waiting for a disk"}

# -- the options -----------------------------------------------------------------


def refuse(expected: str, *, got: str, why: str, fix: str) -> NoReturn:
    """Ends with 2, the code of an error of usage, and a message of four parts."""
    print(message(expected, got=got, why=why, fix=fix), file=sys.stderr)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have four parts."""

    def error(self, message: str) -> NoReturn:
        """Ends with 2 and what was wrong on stderr."""
        refuse(
            f"{self.prog} needs its options as `{self.prog} --help` lists them",
            got=message,
            why="the job is started from them alone: there is no configuration file",
            fix=f"{self.prog} --processes 2 train.py --steps 100",
        )


def _option(default: object, least: int | None, metavar: str | None, text: str) -> Any:
    known = {"least": least, "metavar": metavar, "help": text}
    return dataclasses.field(default=default, metadata=known)


@dataclasses.dataclass(frozen=True)
class Options:
    """What `distjax launch` was told: Python's own arguments, and an option for each other field.

    Its default, the least number that it may be, and its help stand beside it.
    """

    command: tuple[str, ...]
    processes: int = _option(None, 1, "P", "processes of this machine")
    devices_per_process: int | None = _option(None, 1, "D", "CPU devices, or GPUs, of each")
    max_restarts: int = _option(0, 0, "N", "in a row without a new step (0)")
    grace_seconds: float = _option(30.0, 0, "S", "to save when told to end (30)")
    step_deadline: int | None = _option(None, 1, "S", "seconds that a step may take (600)")
    result_dir: str | None = _option(
        None, None, "DIR", "of logs and events; kept (a temporary one)"
    )
    nodes: int = _option(1, 1, "N", "machines of the job (1)")
    node_rank: int = _option(0, 0, "I", "which of them this is (0)")
    coordinator: str | None = _option(
        None, None, "HOST:PORT", "where process 0 listens, for several machines"
    )
    dry_run: bool = _option(False, None, None, "print what would be started")

    @property
    def num_processes(self) -> int:
        """The number of processes of the job, on all machines."""
        return self.processes * self.nodes

    @property
    def first(self) -> int:
        """The id of this machine's first process."""
        return self.node_rank * self.processes

    def environment(self, index: int, attempt: int, address: str, directory: str) -> dict[str, str]:
        """Returns the variables of a process that differ from the launcher's.

        Args:
          index: which of this machine's processes.
          attempt: how many there were before.
          address: where process 0 listens.
          directory: of the results.
        """
        defaults = {
            # Sets of texts are in one order everywhere; a restart finds what was compiled.
            "PYTHONHASHSEED": "0",
            "JAX_COMPILATION_CACHE_DIR": os.path.join(directory, "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
        }
        own = {name: value for name, value in defaults.items() if not os.environ.get(name)}
        own |= {
            "DISTJAX_COORDINATOR": address,
            "DISTJAX_NUM_PROCESSES": str(self.num_processes),
            "DISTJAX_PROCESS_ID": str(self.first + index),
            "DISTJAX_RESULT_DIR": directory,
            "DISTJAX_ATTEMPT": str(attempt),
        }
        if (count := self.devices_per_process) is not None:  # of CPUs; or of GPUs, by their numbers
            ids = range(index * count, (index + 1) * count)
            own["JAX_NUM_CPU_DEVICES"] = str(count)
            own["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, ids))
        if self.step_deadline is not None:
            own["DISTJAX_STEP_DEADLINE"] = str(self.step_deadline)
        return own


def parse(argv: Sequence[str]) -> Options:
    """Returns the options in the arguments of `distjax launch`; ends with 2 if they are wrong."""
    parser = _Parser(
        prog="distjax launch",
        usage="distjax launch --processes P [options] SCRIPT|-m MODULE [arguments of the script]",
        description="Starts the processes of a job on this machine, and keeps it running.",
        allow_abbrev=False,
    )
    ours = {"--" + each.name.replace("_", "-"): each for each in dataclasses.fields(Options)[1:]}
    for option, each in ours.items():
        known: dict[str, Any] = {"default": each.default, "help": each.metadata["help"]}
        if each.type == "bool":
            known["action"] = "store_true"
        else:
            kinds = {"int": int, "float": float, "str": str}
            known["type"] = kinds[str(each.type).partition(" ")[0]]
            known |= {"metavar": each.metadata["metavar"], "required": each.name == "processes"}
        parser.add_argument(option, **known)
    number = 0
    while number < len(argv) and argv[number].startswith("-") and argv[number] not in ("-m", "--"):
        is_flag = "=" in argv[number] or argv[number] in ("--dry-run", "--help", "-h")
        number += 1 if is_flag else 2
    found = vars(parser.parse_args(argv[:number]))
    command = [*argv[number:]]
    command = command[1:] if command[:1] == ["--"] else command
    _require_program(command)
    num_own = 2 if command[0] == "-m" else 1
    arguments = command[num_own:]
    names = [argument.partition("=")[0] for argument in arguments]
    if arguments[:1] == ["--"]:
        del arguments[0]
    elif late := [text for text, name in zip(arguments, names, strict=True) if name in ours]:
        refuse(
            "distjax launch needs its own options before the script",
            got=f"{late[0]} after it",
            why="what follows the script is handed to it, and the launcher would not see it",
            fix="move it before the script; if it is the script's own: "
            f"distjax launch --processes 2 train.py -- {late[0]}",
        )
    options = Options(command=(*command[:num_own], *arguments), **found)
    for option, each in ours.items():
        value, least = found[each.name], each.metadata["least"]
        most = options.nodes - 1 if each.name == "node_rank" else 1 << 31
        if value is not None and least is not None and not least <= value <= most:
            refuse(
                f"distjax launch needs a number from {least} up as {option}"
                + (f", and at most {most}" if each.name == "node_rank" else ""),
                got=str(value),
                why="it counts processes, devices, machines, restarts or seconds; machines are "
                "numbered from 0, and the first one has process 0",
                fix=f"{option} {max(least, min(most, 1))}",
            )
    _require_coordinator(options)
    return options


def _require_program(command: Sequence[str]) -> None:
    is_module = command[:1] == ["-m"]
    name = "".join(command[is_module : is_module + 1])
    if not name:
        got = "-m without the name of a module" if is_module else "nothing"
    elif is_module:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` does
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return
        got = f"-m {name}, and no module of that name is found"
    elif os.path.exists(name):
        return
    else:
        got = f"{name!r}, which does not exist in {os.getcwd()}"
    refuse(
        "distjax launch needs the program that each process runs, after its own options",
        got=got,
        why="every process is `python SCRIPT`, or `python -m MODULE`, with its place in the job",
        fix="distjax launch --processes 2 train.py, or distjax launch --processes 2 -m my.train",
    )


def _require_coordinator(options: Options) -> None:
    if options.coordinator is None:
        if options.nodes == 1:
            return
        refuse(
            "distjax launch needs --coordinator for a job of several machines",
            got=f"--nodes {options.nodes} without it",
            why="process 0, on the machine of --node-rank 0, listens there for all others",
            fix="--coordinator HOST:PORT: that machine's name, and a port that is free there",
        )
    try:
        resolve_host(*split_address(options.coordinator, "--coordinator"))
    except (ClusterError, OSError, UnicodeError) as error:
        is_form = isinstance(error, ClusterError)
        refuse(
            "distjax launch needs a --coordinator HOST:PORT that this machine can look up",
            got=repr(options.coordinator) + ("" if is_form else f" ({error})"),
            why="process 0 listens there, and every process has to find it",
            fix="--coordinator 10.0.0.1:1234 or [fe80::1]:1234: the address of the machine of "
            "--node-rank 0, as `hostname -I` prints it there",
        )


# -- the attempts ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an attempt has failed: what failure.json holds.

    Attributes:
      attempt, process, host: where it was.
      code: the exit code.
      error: type and text of the error, or what is known instead.
      traceback: of the error, if it is an exception.
      step: of a `Job` when it happened, if there was one.
    """

    attempt: int
    process: int
    host: str
    code: int
    error: str
    traceback: str = ""
    step: int | None = None


class Launcher:
    """Runs attempts until one has ended well, or none helps any more.

    Args:
      options: what to start.
      directory: of logs and events.
      show: called with (index, line) for what processes say.
      say: called with the launcher's own lines.
    """

    def __init__(
        self,
        options: Options,
        directory: str,
        show: Callable[[int, bytes], None],
        say: Callable[[str], None],
    ):
        self._options, self._directory, self._show, self._say = options, directory, show, say
        self.queue: queue.SimpleQueue[Ended | int] = queue.SimpleQueue()
        self.failure: Failure | None = None
        self._stopped_by: int | None = None
        self._best_step = -1
        #: Of preemptions, of ports that were taken, and of restarts since the last new step.
        self._counts = {"preemption": 0, "port": 0, "restart": 0}
        self._events = os.path.join(directory, FILE)
        self._offset = 0  # of the events that are not read yet

    def run(self, timeout: float | None = None) -> int:
        """Returns the exit code of the job.

        Raises:
          TimeoutError: it takes longer than `timeout` seconds; no process is left.
        """
        self._offset = os.path.getsize(self._events) if os.path.exists(self._events) else 0
        until = None if timeout is None else time.monotonic() + timeout
        attempt, former = 0, None
        with start_guard() as guard:
            while True:
                best = self._best_step
                code = self._attempt(attempt, guard, until)
                if self._best_step > best:
                    self._counts |= {"preemption": 0, "restart": 0}
                    former = None
                if self.failure is None or self._stopped_by is not None:
                    self._record("ended", attempt, code=code)
                    return code
                is_again, what = self._decide(self.failure, former)
                if not is_again:
                    self._record("ended", attempt, code=code)
                    self._say(f"not restarted: {what}; exit code {code}")
                    return code
                self._record("restarted", attempt)
                step = f"; the latest step is {self._best_step}" if self._best_step >= 0 else ""
                self._say(what + step)
                attempt, former = attempt + 1, self.failure

    def _decide(self, cause: Failure, former: Failure | None) -> tuple[bool, str]:
        """Returns whether there is another attempt, and which one, or why not.

        Args:
          cause: why the last attempt has failed.
          former: why the one before it has, if there was no new step since.
        """
        counts, most = self._counts, self._options.max_restarts
        code, is_ours = cause.code, self._options.coordinator is None
        if code == PREEMPTED and counts["preemption"] < _MAX_PREEMPTIONS:
            counts["preemption"] += 1
            return True, "another attempt, which is no restart"
        is_taken = code == CANNOT_START and "needs to listen at" in cause.error
        if is_ours and is_taken and counts["port"] < _MAX_PORTS:  # somebody was there first
            counts["port"] += 1
            return True, "another attempt, on another port"
        if code not in list(_MEANINGS)[:4] and code <= 128:
            return False, f"no restart helps after {code}"
        same = former is not None and (former.process, former.error) == (cause.process, cause.error)
        if same and code == UNCAUGHT:
            return False, "the same error twice, and no step between"
        if counts["restart"] >= most:
            return False, f"--max-restarts is {most}"
        counts["restart"] += 1
        return True, f"restart {counts['restart']} of {most}"

    def _record(
        self, event: str, attempt: int, process: int | None = None, **facts: object
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the job
            append(self._directory, event, attempt, process, **facts)

    def _attempt(self, attempt: int, guard: subprocess.Popen[bytes], until: float | None) -> int:
        """Runs one attempt; returns its exit code, and keeps why it failed in `failure`."""
        options, self.failure = self._options, None
        folder = os.path.join(self._directory, f"attempt-{attempt}")
        os.makedirs(folder, exist_ok=True)
        ids = range(options.first, options.first + options.processes)
        logs = [os.path.join(folder, f"process-{i}.log") for i in ids]
        given = options.coordinator
        with hold_port() if given is None else contextlib.nullcontext(given) as address:
            own = [
                os.environ | options.environment(index, attempt, address, self._directory)
                for index in range(options.processes)
            ]
            command = [sys.executable, *options.command]
            processes = Processes(command, own, logs, guard, self._show, self.queue)
            try:
                for process, pid in zip(ids, processes.pids, strict=True):
                    self._record("started", attempt, process, pid=pid)
                ended, left = self._wait(attempt, processes, until)
            finally:
                processes.kill()
                processes.finish_reading()
        told = self._read_events(attempt)
        if self._stopped_by is not None:
            codes = {each.code for each in ended}
            return PREEMPTED if PREEMPTED in codes else max(codes) and 128 + self._stopped_by
        self.failure = find_cause(attempt, options, logs, told, ended, left)
        if self.failure is None:
            return 0
        self._tell(self.failure, ended, logs)
        return self.failure.code

    def _wait(
        self, attempt: int, processes: Processes, until: float | None
    ) -> tuple[list[Ended], dict[int, str]]:
        """Returns the ends of all processes in order, and what those did that were killed."""
        ended: list[Ended] = []
        left: dict[int, str] = {}
        deadline = until
        while len(ended) < self._options.processes:
            # A signal may reach another thread, which does not wake this one.
            left_seconds = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            try:
                event = self.queue.get(timeout=min(max(left_seconds, 0), _LOOK_SECONDS))
            except queue.Empty:
                if deadline is None or time.monotonic() < deadline:
                    continue
                left |= {i: _state_of(processes.pids[i]) for i in processes.running()}
                processes.kill()
                if deadline == until:
                    raise TimeoutError from None
                deadline = None
                continue
            if isinstance(event, int):
                self._stop(event, attempt, processes)
                seconds = self._options.grace_seconds
            else:
                ended.append(event)
                self._record("exited", attempt, self._options.first + event.place, code=event.code)
                seconds = None if event.was_killed else self._seconds_for_others(event, attempt)
            if seconds is not None:
                limit = time.monotonic() + seconds
                deadline = limit if deadline is None else min(deadline, limit)
        return ended, left

    def _stop(self, number: int, attempt: int, processes: Processes) -> None:
        """Tells all to stop; a second Ctrl-C kills them."""
        if number == signal.SIGINT and self._stopped_by is not None:
            processes.kill()
            return
        self._stopped_by = self._stopped_by or number
        name = signal.Signals(number).name
        self._record("stopped", attempt, signal=name)
        self._say(f"{name}: the processes have {self._options.grace_seconds:g} s to save and end")
        processes.signal(signal.SIGTERM)

    def _seconds_for_others(self, event: Ended, attempt: int) -> float | None:
        """Returns how long the others may take to end after one has; None: as long as they like."""
        if self._stopped_by is not None:
            return None
        if event.code == PREEMPTED:
            return self._options.grace_seconds
        if event.code != 0:
            return _FOLLOW_SECONDS.get(event.code, 0.0)
        told = self._read_events(attempt, keep=True)
        return None if _has_joined(told, event.place, self._options) else _UNJOINED_SECONDS

    def _read_events(self, attempt: int, *, keep: bool = False) -> list[dict[str, Any]]:
        """Returns what processes have told since the last attempt, and notes the latest step."""
        told: list[dict[str, Any]] = []
        with contextlib.suppress(OSError), open(self._events, "rb") as file:
            file.seek(self._offset)
            for line in file.read().split(b"\n"):
                with contextlib.suppress(ValueError):
                    told.append(json.loads(line))
            self._offset = self._offset if keep else file.tell()
        told = [event for event in told if event.get("attempt") == attempt]
        steps = [e["step"] for e in told if e["event"] in ("committed", "restored") and e["step"]]
        self._best_step = max([self._best_step, *steps])
        return told

    def _tell(self, cause: Failure, ended: Sequence[Ended], logs: Sequence[str]) -> None:
        """Prints the first cause, then what followed from it, then where the logs are."""
        facts = dataclasses.asdict(cause)
        path = os.path.join(self._directory, "failure.json")
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(facts, file)
        del facts["host"]
        self._record("failure", **facts)
        if cause.code == PREEMPTED:
            self._say("the job was told to stop, and has saved")
            return
        at = "" if cause.step is None else f", in step {cause.step}"
        meaning = _MEANINGS.get(cause.code) or _signal_name(cause.code)
        self._say(
            f"attempt {cause.attempt} failed: process {cause.process} on {cause.host}{at}: "
            f"exit code {cause.code}" + (f" ({meaning})" if meaning else "")
        )
        is_users = cause.code == UNCAUGHT  # what distjax itself raises says all in its text
        for line in (is_users and cause.traceback or cause.error).rstrip().splitlines():
            self._say("  " + line)
        first = self._options.first
        others = [
            f"process {first + i} " + ("was killed" if was_killed else f"ended with {code}")
            for i, code, was_killed in ended
            if first + i != cause.process and code
        ]
        if others:
            self._say("then " + ", ".join(others))
        self._say(f"logs: {logs[cause.process - first]}")


@contextlib.contextmanager
def hold_port() -> Generator[str]:
    """A context in which an address of loopback is ours, though nobody listens there yet.

    An outgoing connection could take it before process 0 listens there, or another launcher. So it
    is bound, to a socket that does not listen; Linux lets process 0 bind it, too, since both allow
    their address to be reused. Where another system does not, it is let go, and lost rarely.
    """
    with socket.socket() as held:
        port = 0
        while not port:
            with contextlib.suppress(OSError):  # it is another's
                held.bind(("127.0.0.1", random.SystemRandom().choice(_PORTS)))
                port = held.getsockname()[1]
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform != "linux":
            held.close()
        yield f"127.0.0.1:{port}"


# -- what failed first -----------------------------------------------------------


def find_cause(
    attempt: int,
    options: Options,
    logs: Sequence[str],
    told: Sequence[Mapping[str, Any]],
    ended: Sequence[Ended],
    left: Mapping[int, str],
) -> Failure | None:
    """Returns why an attempt has failed; None if it has not.

    Args:
      attempt: its number.
      options: what was started.
      logs: the log of each process.
      told: the events of the attempt.
      ended: how each process has ended, in order.
      left: what those did that did not end by themselves, by index.
    """
    make = lambda process, *facts: Failure(attempt, process, socket.gethostname(), *facts)
    recorded: dict[int, Mapping[str, Any]] = {}
    for event in told:
        if event["event"] == "failed":
            recorded.setdefault(event["process"] - options.first, event)
    found: list[tuple[int, float, Failure]] = []  # by rank: who only follows comes later
    for order, (index, code, was_killed) in enumerate(ended):
        process, event = options.first + index, recorded.get(index)
        has_joined = _has_joined(told, index, options)
        if event is not None:
            names_who = "Got: the end of process" in event["error"]  # on another machine
            rank = 0 if event["code"] != PEER_LOST else 1 if names_who else 2
            what = (event[name] for name in ("process", "code", "error", "traceback", "step"))
            found.append((rank, event["time"], make(*what)))
        elif code == 0 and not has_joined:
            text = message(
                f"each process of a job of {options.num_processes} needs to join it",
                got=f"the end of process {process} without a call of dj.initialize",
                why="each would train a model of its own, and the others would wait for it",
                fix="dj.initialize() at the start of the script; or distjax launch --processes 1",
            )
            found.append((1, order, make(process, CANNOT_START, text)))
        elif code != 0 and not was_killed:
            raised = last_traceback(logs[index]) if code != 137 else None
            is_ours = has_joined and options.num_processes > 1
            if code == 1 and raised is not None and not is_ours:
                code = UNCAUGHT  # Python's own code for an exception
            said = raised or (_signal_name(code) or f"exit code {code}, without an error",)
            rank = 2 if code in (_ABORTED, PEER_LOST) else 0
            found.append((rank, order, make(process, code, *said)))
    if not found:
        return None
    rank, _, cause = min(found, key=lambda row: row[:2])
    frozen = [index for index, state in left.items() if state in _FROZEN.values()]
    if rank < 2 or not frozen:
        return cause
    index, process = frozen[0], options.first + frozen[0]
    text = message(
        f"process {process} needs to answer the others",
        got=f"nothing more from it, which was {left[index]}; and of process {cause.process}: "
        + as_part(cause.error),
        why="the system keeps it from running",
        fix=f"look at its log, {logs[index]}, and at its machine",
    )
    return make(process, cause.code, text)


def _has_joined(told: Sequence[Mapping[str, Any]], index: int, options: Options) -> bool:
    """Returns whether a process that ended well was part of the job."""
    joined = {event["process"] for event in told if event["event"] == "joined"}
    return options.num_processes == 1 or options.first + index in joined


def last_traceback(path: str) -> tuple[str, str] | None:
    """Returns the last Python error in a log, as (type and text, traceback), or None."""
    try:
        with open(path, "rb") as file:
            file.seek(max(os.path.getsize(path) - _TAIL_BYTES, 0))
            tail = file.read().decode(errors="replace")
    except OSError:
        return None
    found = tail.rfind("Traceback (most recent call last):")
    lines = tail[max(found, 0) :].splitlines()
    pattern = r"(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Exit|Warning|Group)\b.*"
    ends = [i for i, line in enumerate(lines) if re.fullmatch(pattern, line)]
    if found >= 0:
        ends = [i for i, line in enumerate(lines) if i and line[:1].strip()]
    if not ends:
        return None
    return lines[ends[0]], "\n".join(lines[0 if found >= 0 else ends[0] : ends[0] + 1])


def _signal_name(code: int) -> str:
    names = {128 + number: f"ended by {number.name}" for number in signal.Signals}
    return names.get(code, "")


def _state_of(pid: int) -> str:
    """Returns what a process that did not end was doing, as far as the system says."""
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        return _FROZEN.get(file.read().rpartition(")")[2].split()[0], "running")
    return "running"


# -- the command -----------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Runs `distjax launch` with these arguments, and returns its exit code."""
    options = parse(argv)
    if options.dry_run:
        directory = os.path.abspath(options.result_dir or "a-temporary-directory")
        for index in range(options.processes):
            address = options.coordinator or "127.0.0.1:1234"
            own = options.environment(index, 0, address, directory)
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in own.items())
            command = shlex.join((sys.executable, *options.command))
            print(f"[{options.first + index}] {variables} {command}")
        return 0
    directory = _make_directory(options)
    launcher = Launcher(options, directory, output(options.first), _say)
    with signals_to(launcher.queue):
        code = launcher.run()
    if options.result_dir is None and code == 0:
        shutil.rmtree(directory, ignore_errors=True)
    return code


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the job
        print(f"[launch] {text}", file=sys.stderr, flush=True)


def _make_directory(options: Options) -> str:
    """Returns the directory of the results; what an earlier launch left there is put aside."""
    if options.result_dir is None:
        return tempfile.mkdtemp(prefix="distjax-launch-")
    directory = os.path.abspath(options.result_dir)
    if options.nodes > 1:  # each machine its own, since they may share the disk
        directory = os.path.join(directory, f"node-{options.node_rank}")
    try:
        os.makedirs(directory, exist_ok=True)
        there = os.listdir(directory)
        names = [n for n in there if n.startswith("attempt-") or n == "failure.json"]
        if names:
            number = sum(name.startswith("before-") for name in there)
            former = os.path.join(directory, f"before-{number}")
            os.mkdir(former)
            for name in names:
                os.rename(os.path.join(directory, name), os.path.join(former, name))
    except OSError as error:
        refuse(
            "distjax launch needs a --result-dir in which it can write",
            got=f"{options.result_dir!r} ({error.strerror})",
            why="logs, events and compiled programs are kept there",
            fix="--result-dir runs/first, or none: then it is a temporary one",
        )
    return directory
