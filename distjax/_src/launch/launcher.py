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
import functools
import json
import math
import os
import queue
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from distjax._src.cluster.job import FILE, append, as_plain, parse_line
from distjax._src.cluster.roll_call import resolve_host, split_address
from distjax._src.launch.processes import FROZEN, Ended, Processes, output, signals_to
from distjax.errors import ClusterError, message

UNCAUGHT, PEER_LOST, PREEMPTED, STUCK, DIFFERENT, CANNOT_START = 70, 71, 75, 76, 77, 78
_ABORTED = 128 + signal.SIGABRT
#: After these, and after signals, another attempt may help; 137 is also memory that ran out.
_RESTARTED = (UNCAUGHT, PEER_LOST, STUCK, 137)
#: After these the others are about to say why, and one of them may be the cause: they have this
#: long to end by themselves. After other codes they are killed at once, but where there are other
#: machines: process 0 tells those what has failed before it ends.
_FOLLOWED = (PEER_LOST, STUCK, DIFFERENT, _ABORTED)
_FOLLOW_SECONDS = 2.0
_LOOK_SECONDS = 0.2
#: More relaunches after preemptions without a new step are a loop.
_MAX_PREEMPTIONS = 100
_TAIL_BYTES = 1 << 16
_MAX_LINE = 200
#: The last lines of an error that Python prints; the group is its type and text.
_ERROR = re.compile(
    r'^(?:Traceback \(most recent call last\):|  File "[^\n]*", line \d+)\n'
    r"(?:[ \t][^\n]*\n|\n)*(\S[^\n]*)",
    re.MULTILINE,
)

#: What is said of a process that a signal has ended.
_ENDS = {128 + number: f"ended by {number.name}" for number in signal.Signals} | {
    137: "killed by SIGKILL, as happens when memory runs out",
    _ABORTED: "aborted, as JAX does when another process is lost",
}

# -- the options -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Options:
    """What `distjax launch` was told: Python's own arguments, and its options by their names."""

    command: Sequence[str]
    processes: int
    devices_per_process: int | None = None
    max_restarts: int = 0
    grace_seconds: float = 30.0
    step_deadline: int | None = None
    result_dir: str | None = None
    nodes: int = 1
    node_rank: int = 0
    coordinator: str | None = None
    dry_run: bool = False

    @property
    def num_processes(self) -> int:
        """The number of processes of the job, on all machines."""
        return self.processes * self.nodes

    @property
    def ids(self) -> range:
        """The processes of this machine."""
        return range(self.node_rank * self.processes, (self.node_rank + 1) * self.processes)

    def environment(
        self, process: int, attempt: int, address: str, directory: str
    ) -> dict[str, str]:
        """Returns the variables of a process that differ from the launcher's."""
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
            "DISTJAX_PROCESS_ID": str(process),
            "DISTJAX_RESULT_DIR": directory,
            "DISTJAX_ATTEMPT": str(attempt),
        }
        if (count := self.devices_per_process) is not None:  # of CPUs; or of GPUs, by their numbers
            first = (process - self.ids[0]) * count
            own["JAX_NUM_CPU_DEVICES"] = str(count)
            own["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, range(first, first + count)))
        if self.step_deadline is not None:
            own["DISTJAX_STEP_DEADLINE"] = str(self.step_deadline)
        return own


def refuse(expected: str, *, got: str, why: str, fix: str) -> NoReturn:
    """Ends with 2, the code of an error of usage, and a message of four parts."""
    print(message(expected, got=got, why=why, fix=fix), file=sys.stderr)
    sys.exit(2)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have four parts."""

    def error(self, message: str) -> NoReturn:
        """Ends with 2 and what was wrong on stderr."""
        refuse(
            f"{self.prog} needs its options as `{self.prog} --help` lists them, and a program",
            got=message.strip().removesuffix("."),
            why="each process is `python SCRIPT` or `python -m MODULE`, with its place in the job; "
            "what follows the script is handed to it",
            fix=f"{self.prog} --processes 2 train.py --steps 100; on each of several machines: "
            "--nodes 2 --node-rank 0 --coordinator 10.0.0.1:1234, as `hostname -I` prints it on "
            "that of rank 0; a script's option that the launcher has, too: train.py -- --dry-run",
        )


def parse(argv: Sequence[str]) -> Options:
    """Returns the options in the arguments of `distjax launch`; ends with 2 if they are wrong."""
    parser = _Parser(
        prog="distjax launch",
        usage="distjax launch --processes P [options] SCRIPT|-m MODULE [arguments of the script]",
        description="Starts the processes of a job on this machine, and keeps it running.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    add = functools.partial(parser.add_argument, type=int)
    add("--processes", metavar="P", required=True, help="processes of this machine")
    add("--devices-per-process", metavar="D", help="CPU devices, or GPUs, of each")
    add("--max-restarts", metavar="N", help="in a row without a new checkpoint (0)")
    add("--grace-seconds", metavar="S", type=float, help="to save when told to end (30)")
    add("--step-deadline", metavar="S", help="seconds that a step may take (600)")
    add("--result-dir", metavar="DIR", type=str, help="of logs and events; kept (temporary)")
    add("--nodes", metavar="N", help="machines of the job (1)")
    add("--node-rank", metavar="I", help="which of them this is (0)")
    add("--coordinator", metavar="HOST:PORT", type=str, help="where process 0 listens")
    parser.add_argument("--dry-run", action="store_true", help="print what would be started")
    for name, text in ("-m", "a module"), ("script", "a file"):  # what follows is the program's
        parser.add_argument(name, nargs=argparse.REMAINDER, help=f"{text}, and its arguments")
    found = vars(parser.parse_args(argv))
    as_option = lambda name: "--" + name.replace("_", "-")
    for name, value in found.items():
        least = int(name in ("processes", "devices_per_process", "step_deadline", "nodes"))
        if isinstance(value, (int, float)) and value < least:
            parser.error(f"{as_option(name)} {value}, which is at least {least}")
    module, script = found.pop("m", []), found.pop("script", [])
    command, rest = (["-m", *module], 2) if module else (script, 1)
    if not command:
        parser.error("no script, and no -m with a module behind it")
    if script and not os.path.exists(script[0]):
        parser.error(f"{script[0]!r}, which does not exist in {os.getcwd()}")
    names = [as_option(each.name) for each in dataclasses.fields(Options)[1:]]
    if command[rest : rest + 1] == ["--"]:
        del command[rest]
    elif late := [text for text in command[rest:] if text.partition("=")[0] in names]:
        parser.error(f"{late[0]} after the script")
    options = Options(command, **found)
    if options.node_rank >= options.nodes:
        parser.error(f"--node-rank {options.node_rank} of {options.nodes}, counted from 0")
    try:
        if options.coordinator is not None:
            resolve_host(*split_address(options.coordinator, "--coordinator"))
        elif options.nodes > 1:
            parser.error(f"--nodes {options.nodes} without --coordinator, where process 0 listens")
    except (ClusterError, OSError, UnicodeError) as error:
        why = "" if isinstance(error, ClusterError) else f", which is not found: {error}"
        parser.error(f"--coordinator {options.coordinator!r}{why}")
    return options


# -- the attempts ----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why an attempt has failed, as in failure.json: the error, or what is known instead."""

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
      show: called with (process, line) for what processes say.
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
        self._record = functools.partial(append, directory)
        self._best_step = -1
        self._restarts = self._preemptions = 0  # since the last new step

    def run(self, timeout: float | None = None) -> int:
        """Returns the exit code of the job.

        Raises:
          TimeoutError: it takes longer than `timeout` seconds; no process is left.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        attempt, former = 0, None
        while True:
            best = self._best_step
            code = self._attempt(attempt, until)
            if self._best_step > best:
                self._restarts, self._preemptions, former = 0, 0, None
            is_again, what = self._decide(self.failure, former)
            self._record("restarted" if is_again else "ended", attempt, code=code)
            if not is_again:
                if what:
                    self._say(f"not restarted: {what}; exit code {code}")
                return code
            last = self._best_step
            self._say(
                what + (f"; the last checkpoint reported is step {last}" if last >= 0 else "")
            )
            attempt, former = attempt + 1, self.failure

    def _decide(self, cause: Failure | None, former: Failure | None) -> tuple[bool, str]:
        """Returns whether there is another attempt after a failure, and which one, or why not.

        The `former` one is that of the attempt before, if there was no new step since.
        """
        if cause is None or self._stopped_by is not None:
            return False, ""
        code, most = cause.code, self._options.max_restarts
        if code == PREEMPTED and self._preemptions < _MAX_PREEMPTIONS:
            self._preemptions += 1
            return True, "another attempt, not counted as a restart"
        if code not in _RESTARTED and code <= 128:
            return False, f"no restart helps after {code}"
        same = former is not None and (former.process, former.error) == (cause.process, cause.error)
        if same and code == UNCAUGHT:
            return False, "the same error twice, without a new checkpoint"
        if self._restarts >= most:
            return False, f"--max-restarts is {most}"
        self._restarts += 1
        return True, f"restart {self._restarts} of {most}"

    def _attempt(self, attempt: int, until: float) -> int:
        """Runs one attempt; returns its exit code, and keeps why it failed in `failure`."""
        options, self.failure = self._options, None
        folder = os.path.join(self._directory, f"attempt-{attempt}")
        os.makedirs(folder, exist_ok=True)
        logs = {i: os.path.join(folder, f"process-{i}.log") for i in options.ids}
        address = options.coordinator or free_address()
        with Processes(self._show, self.queue) as processes:
            command = [sys.executable, *options.command]
            for process, log in logs.items():
                own = options.environment(process, attempt, address, self._directory)
                pid = processes.start(process, command, os.environ | own, log)
                self._record("started", attempt, process, pid=pid)
            ended = self._wait(attempt, processes, until)
        told = self._told(attempt)
        steps = [e["step"] for e in told if e["event"] in ("committed", "restored") and e["step"]]
        self._best_step = max([self._best_step, *steps])
        if self._stopped_by is not None:
            codes = {each.code for each in ended}
            return PREEMPTED if PREEMPTED in codes else max(codes) and 128 + self._stopped_by
        self.failure = find_cause(attempt, options, logs, told, ended)
        if self.failure is None:
            return 0
        self._tell(self.failure, ended, logs)
        return self.failure.code

    def _wait(self, attempt: int, processes: Processes, until: float) -> list[Ended]:
        """Returns the ends of all processes, in order."""
        ended: list[Ended] = []
        deadline = until
        while len(ended) < self._options.processes:
            rest = max(deadline - time.monotonic(), 0)
            try:  # a signal may reach another thread, which does not wake this one
                event = self.queue.get(timeout=min(rest, _LOOK_SECONDS))
            except queue.Empty:
                if not rest:
                    processes.kill()
                    if deadline == until:
                        raise TimeoutError from None
                    deadline = math.inf
                continue
            if isinstance(event, int):
                self._stop(event, attempt, processes)
                seconds = self._options.grace_seconds
            else:
                ended.append(event)
                self._record("exited", attempt, event.process, code=event.code)
                seconds = self._seconds_for_others(event, attempt)
            deadline = min(deadline, time.monotonic() + seconds)
        return ended

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

    def _seconds_for_others(self, event: Ended, attempt: int) -> float:
        """Returns how long the others may take to end after one has."""
        if event.state or self._stopped_by is not None:
            return math.inf
        if event.code == PREEMPTED:
            return self._options.grace_seconds
        if event.code != 0:
            is_followed = event.code in _FOLLOWED or self._options.nodes > 1
            return _FOLLOW_SECONDS if is_followed else 0.0
        has_joined = _has_joined(self._told(attempt), event.process, self._options)
        return math.inf if has_joined else 0.0

    def _told(self, attempt: int) -> list[dict[str, Any]]:
        """Returns the events of an attempt."""
        with contextlib.suppress(OSError), open(os.path.join(self._directory, FILE), "rb") as file:
            return [event for line in file if (event := parse_line(line)).get("attempt") == attempt]
        return []

    def _tell(self, cause: Failure, ended: Sequence[Ended], logs: Mapping[int, str]) -> None:
        """Prints the first cause, then what followed from it, then where the logs are."""
        path = os.path.join(self._directory, "failure.json")
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(dataclasses.asdict(cause), file)
        if cause.code == PREEMPTED:
            self._say("the job was told to stop, and has saved")
            return
        at = "" if cause.step is None else f", in step {cause.step}"
        who = f"process {cause.process} on {cause.host}{at}"
        self._say(f"attempt {cause.attempt} failed: {who}: exit code {cause.code}")
        is_users = cause.code == UNCAUGHT  # what distjax itself raises says all in its text
        for line in (is_users and cause.traceback or cause.error).rstrip().splitlines():
            self._say("  " + line)
        others = [
            f"process {i} " + ("was killed" if state else f"ended with {code}")
            for i, code, state in ended
            if i != cause.process and code
        ]
        if others:
            self._say("then " + ", ".join(others))
        self._say(f"logs: {logs[cause.process]}")


def free_address() -> str:
    """Returns an address of loopback at which nobody listens: the system chooses its port."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{chosen.getsockname()[1]}"


# -- what failed first -----------------------------------------------------------


def find_cause(
    attempt: int,
    options: Options,
    logs: Mapping[int, str],
    told: Sequence[Mapping[str, Any]],
    ended: Sequence[Ended],
) -> Failure | None:
    """Returns why an attempt has failed, by its logs, events and ends; None if it has not."""
    failed = {e["process"]: e for e in reversed(told) if e["event"] == "failed"}  # first of each
    found: list[tuple[int, float, Failure]] = []  # by rank: who only follows comes later
    for order, (process, code, state) in enumerate(ended):
        make = functools.partial(Failure, attempt, process, socket.gethostname())
        has_joined = _has_joined(told, process, options)
        if event := failed.get(process):
            is_jax = "\n  Got: " not in event["error"]  # which does not say who is lost
            rank = {DIFFERENT: 1, PEER_LOST: 3 if is_jax else 2}.get(event["code"], 0)
            facts = [event[name] for name in ("code", "error", "traceback", "step")]
            found.append((rank, event["time"], make(*facts)))
        elif code == 0 and not has_joined:
            text = message(
                f"each process of a job of {options.num_processes} needs to join it",
                got=f"the end of process {process} without a call of dj.initialize",
                why="each would train a model of its own, and the others would wait for it",
                fix="dj.initialize() at the start of the script; or distjax launch --processes 1",
            )
            found.append((2, order, make(CANNOT_START, text)))
        elif state in FROZEN.values():
            text = message(
                f"process {process} needs to answer the others",
                got=f"nothing more from it, which was {state}",
                why="the system keeps it from running",
                fix=f"look at its log, {logs[process]}, and at its machine",
            )
            found.append((2, order, make(PEER_LOST, text)))
        elif code != 0 and not state:
            last, trace = last_words(logs[process])
            if code == 137 or not trace:
                said = f"; its last line: {last}" if last else ""
                last, trace = _ENDS.get(code, f"exit code {code}, without an error{said}"), ""
            is_ours = has_joined and options.num_processes > 1
            if code == 1 and trace and not is_ours:
                code = UNCAUGHT  # Python's own code for an exception
            rank = 3 if code in (_ABORTED, PEER_LOST) else 0
            found.append((rank, order, make(code, last, trace)))
    return min(found, key=lambda row: row[:2])[2] if found else None


def _has_joined(told: Sequence[Mapping[str, Any]], process: int, options: Options) -> bool:
    """Returns whether a process that ended well was part of the job."""
    joined = {event["process"] for event in told if event["event"] == "joined"}
    return options.num_processes == 1 or process in joined


def last_words(path: str) -> tuple[str, str]:
    """Returns the last Python error in a log, and its traceback; or the last line, and ""."""
    text = ""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(os.path.getsize(path) - _TAIL_BYTES, 0))
        text = file.read().decode(errors="replace").strip()
    for found in reversed([*_ERROR.finditer(text + "\n")]):
        return found[1], found[0]
    return as_plain("".join(text.splitlines()[-1:]), _MAX_LINE), ""


# -- the command -----------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Runs `distjax launch` with these arguments, and returns its exit code."""
    options = parse(argv)
    if options.dry_run:
        directory = os.path.abspath(options.result_dir or "a-temporary-directory")
        for process in options.ids:
            address = options.coordinator or "127.0.0.1:1234"
            own = options.environment(process, 0, address, directory)
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in own.items())
            command = shlex.join((sys.executable, *options.command))
            print(f"[{process}] {variables} {command}")
        return 0
    try:
        directory = _make_directory(options)
    except OSError as error:
        refuse(
            "distjax launch needs a --result-dir in which it can write",
            got=f"{options.result_dir!r} ({error.strerror})",
            why="logs, events and compiled programs are kept there",
            fix="--result-dir runs/first, or none: then it is a temporary one",
        )
    launcher = Launcher(options, directory, output(), _say)
    with signals_to(launcher.queue):
        code = launcher.run()
    if options.result_dir is None and launcher.failure is None:
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
    os.makedirs(directory, exist_ok=True)
    there = os.listdir(directory)
    if names := [n for n in there if n.startswith("attempt-") or n in (FILE, "failure.json")]:
        number = sum(name.startswith("before-") for name in there)
        os.mkdir(former := os.path.join(directory, f"before-{number}"))
        for name in names:
            os.rename(os.path.join(directory, name), os.path.join(former, name))
    return directory
