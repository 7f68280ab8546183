"""What this process does: its calls that involve others, its slow work, and both as a mark.

A call is the launch of a program over several processes, a meeting, or an eager write of a host
value. Compiled programs need no meeting, so processes might launch them in a different order,
launch one too often, or pass different host values. Ledgers reveal that: at the next meeting, where
they are compared first, and to the watch, which compares them in between. Each call updates a
checksum, and the checksums of the latest calls are kept, so that a process that is merely behind
is compared at its own count.

A process that compiles, reads data or writes a checkpoint is not stuck, even if the others wait in
a program that it has not launched yet. Such a phase has its own time limit, `phase_timeout`.

Launches are recorded while Ctrl-C is held: see `interrupts`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import zlib
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

from distjax._src.cluster.job import Job, as_line, as_plain, parse_line
from distjax.errors import describe_error, describe_value, require

#: How many calls are remembered; a power of two. No process gets further ahead of another, since
#: launches are awaited.
_SIZE = 4096
#: How many launches may be in flight, with their tokens held; a power of two.
_NUM_AWAITED = 64
_NUM_SHOWN = 4


class Token(Protocol):
    """A program output that is ready when the program has completed."""

    def is_ready(self) -> bool: ...

    def block_until_ready(self) -> object: ...


class Launch(NamedTuple):
    """What is known about a launch before it happens.

    Attributes:
      name: the user's name of the function, or that of an operation.
      program: checksum of what the processes agreed on before its first launch. It distinguishes
        functions with the same name, and shapes, static values and modes of one function. It is of
        the program's text: a process that dropped its program compiles the same text again.
      arguments: checksum of its host arguments; 0: it has none.
    """

    name: str
    program: int = 0
    arguments: int = 0

    @property
    def text(self) -> str:
        """The description for people."""
        return f"{self.name} of arguments {self.arguments:08x}" if self.arguments else self.name

    def added_to(self, checksum: int) -> int:
        """Returns the checksum of all calls up to this one, given that of those before."""
        return zlib.crc32(self.name.encode(), checksum ^ self.program ^ self.arguments)


class Call(NamedTuple):
    """A call, as reported to other processes.

    Attributes:
      number: counted from 1.
      checksum: of all calls up to this one.
      text: a description for people.
      program: see `Launch`.
    """

    number: int
    checksum: int
    text: str
    program: int = 0


_MEETING = Launch("a meeting")


class Ledger:
    """The calls of one process. Recording a launch costs a microsecond.

    Attributes:
      count: the number of calls.
      checksum: of all of them.
      starting: a launch that has not returned.
    """

    def __init__(self) -> None:
        self.count = self.checksum = 0
        self.starting: Launch | None = None
        self._latest: Token | None = None
        self._thread = 0  # the one that launched `_latest`
        self._launched: list[tuple[int, Token | None]] = [(0, None)] * _NUM_AWAITED
        # (number, checksum, launch, occasion of a meeting)
        self._calls: list[tuple[int, int, Launch, str]] = [(0, 0, _MEETING, "")] * _SIZE
        self._one_at_a_time = threading.Lock()
        self._launching = threading.RLock()  # held from the beginning of a launch to its end

    def begin_launch(self, launch: Launch) -> None:
        """Records that a program over several processes is about to run.

        With one CPU device per process, JAX keeps launches in order only within a thread: another
        thread's program would run alongside those in flight, and their collectives would pair up.
        So this first waits for the latest launch of another thread, and no other thread begins one
        until `end_launch`. Take no lock in between.
        """
        self._launching.acquire()
        if self._thread != threading.get_ident():
            self.wait()
        self.starting = launch

    def wait(self) -> None:
        """Waits for the latest launch to complete; errors surface where its results are read."""
        if self._latest is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                self._latest.block_until_ready()

    def end_launch(self, launch: Launch, token: Token | None) -> None:
        """Records that the program was launched, and is complete when `token` is ready.

        None: the launch failed, so the program did not run.
        """
        self.starting = None
        if token is not None:
            self._latest, self._thread = token, threading.get_ident()
            number = self._add(launch)
            self._launched[number & _NUM_AWAITED - 1] = number, token
        self._launching.release()

    def add_meeting(self, occasion: str) -> None:
        """Records a meeting; the checksum ignores its occasion, which meetings compare."""
        self._add(_MEETING, occasion)

    def add_write(self, name: str, value: int) -> None:
        """Records an eager write, of which each process does its own part; value: its checksum."""
        self._add(Launch(name, arguments=value))

    def _add(self, launch: Launch, occasion: str = "") -> int:
        with self._one_at_a_time:
            number = self.count + 1
            self.checksum = checksum = launch.added_to(self.checksum)
            self._calls[number & _SIZE - 1] = number, checksum, launch, occasion
            self.count = number
        return number

    def find(self, number: int) -> Call | None:
        """Returns the call with a number; None if it has not happened yet or is forgotten."""
        found, checksum, launch, meeting = self._calls[number & _SIZE - 1]
        if found != number:
            return None
        return Call(number, checksum, meeting or launch.text, launch.program)

    def find_in_flight(self) -> int | None:
        """Returns the number of the first launch that has not completed; None: all have.

        One that has not returned counts as the next call.
        """
        for number, token in sorted(self._launched, key=lambda each: each[0]):
            if token is not None and not _is_ready(token):
                return number
        blocked = self.find_blocked()
        return None if blocked is None else blocked.number

    def find_blocked(self) -> Call | None:
        """Returns the launch that has not returned, as the call it will become."""
        with self._one_at_a_time:  # else it may return meanwhile, and be reported twice
            starting, count, former = self.starting, self.count, self.checksum
        if starting is None:
            return None
        return Call(count + 1, starting.added_to(former), starting.text, starting.program)

    def describe(self) -> str:
        """Returns one line: number of calls, the latest of them, overall checksum.

        Meetings without their occasions: where these differ, an error has said so, and may have
        been caught.
        """
        numbers = range(max(1, self.count - _NUM_SHOWN + 1), self.count + 1)
        latest = ", ".join(self._calls[number & _SIZE - 1][2].text for number in numbers) or "none"
        return f"{self.count} calls, the latest {latest} (checksum {self.checksum:08x})"


def _is_ready(token: Token) -> bool:
    try:
        return token.is_ready()
    except RuntimeError:  # deleted along with its backend
        return True


#: The ledger of this process.
ledger = Ledger()


# -- phases: slow work of this process alone, reported to those waiting for it ---


class Phase(NamedTuple):
    """What a thread is doing.

    Attributes:
      what: a description for people, such as "compiling step".
      since: when it began, by `time.monotonic`.
      is_work: whether the process itself is busy; otherwise it waits for others, which has its own
        timeout.
    """

    what: str
    since: float
    is_work: bool


_by_thread: dict[int, Phase] = {}
_num_phases = 0


def phase(what: str) -> contextlib.AbstractContextManager[None]:
    """Tells the other processes that this one is at slow work, not stuck.

    In a multi-process job, the others wait for this process at the next meeting or program:
    for `meeting_timeout` or `step_deadline`, and while it is in a phase, for up to
    `phase_timeout` (see `initialize`). Compiling, waiting for data and checkpoints are
    phases automatically; an evaluation by one process alone is not.

    Args:
      what: what the process is doing, for the others' errors.

    Raises:
      TypeError: `what` is not a string.

    Example:
      >>> if jax.process_index() == 0:
      ...     with dj.phase("drawing samples"):
      ...         pass  # minutes of Python
    """
    require(  # else the watch would fail, and end the job, when reporting it
        type(what) is str,
        "dj.phase needs a string",
        got=describe_value(what),
        why="it says what this process is doing, in the errors of the others",
        fix="with dj.phase('drawing samples'):",
        error=TypeError,
    )
    return _phase(what, is_work=True)


def waiting(what: str) -> contextlib.AbstractContextManager[None]:
    """Marks this thread as waiting for others, which has its own timeout."""
    return _phase(what, is_work=False)


@contextlib.contextmanager
def _phase(what: str, is_work: bool) -> Generator[None]:
    global _num_phases
    thread = threading.get_ident()
    outer = _by_thread.get(thread)
    _by_thread[thread] = Phase(what, time.monotonic(), is_work)
    _num_phases += is_work
    try:
        yield
    finally:
        if outer is None:
            _by_thread.pop(thread, None)
        else:
            _by_thread[thread] = outer


def phases() -> tuple[Phase, ...]:
    """Returns what the threads of this process are doing."""
    return tuple(_by_thread.values())


def num_phases() -> int:
    """Returns how many phases of work this process has begun."""
    return _num_phases


# -- marks: what a process reports between meetings ------------------------------

_PLACE = "distjax/watch"
#: Where the first process that exits early says why: beside the mark that all look at.
CAUSE = f"{_PLACE}/0/cause"
#: How many of its latest calls a process reports.
_NUM_TOLD = 8
_MAX_TEXT = 80


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a process is.

    Attributes:
      count: how many calls it has made.
      calls: the latest of them, in order.
      at: what its threads are doing.
      is_busy: whether it is doing slow work of its own.
      num_phases: how many phases it has begun, so that short ones show as well.
    """

    count: int
    calls: tuple[Call, ...]
    at: str = ""
    is_busy: bool = False
    num_phases: int = 0

    def describe(self) -> str:
        """Returns "51 calls, compiling step"."""
        return f"{self.count} calls" + (f", {self.at}" if self.at else "")


def mark_of(
    ledger: Ledger,
    phases: Sequence[Phase],
    blocked: Call | None = None,
    handled: BaseException | None = None,
) -> Mark:
    """Returns the mark of this process.

    A launch that does not return, `blocked`, is its last call; an exception whose `finally` or
    `except` block runs is `handled`.
    """
    count = ledger.count
    found = map(ledger.find, range(max(1, count - _NUM_TOLD + 1), count + 1))
    calls = [call for call in found if call is not None]
    if blocked is not None and blocked.number == count + 1:
        calls, count = [*calls, blocked], count + 1
    doing = [p.what for p in phases]
    if handled is not None:
        doing.append(f"handling {_describe(handled)}")
    at, is_busy = as_plain(", ".join(doing), _MAX_TEXT), any(p.is_work for p in phases)
    return Mark(count, tuple(calls), at, is_busy, num_phases())


def _describe(error: BaseException) -> str:
    try:
        return describe_error(error)
    except Exception:  # of a user's class whose text raises
        return type(error).__name__


def as_text(mark: Mark) -> str:
    """Returns a mark as a line."""
    calls = [call._replace(text=as_plain(call.text, _MAX_TEXT)) for call in mark.calls]
    return as_line({**vars(mark), "calls": calls})


def parse_mark(line: str) -> Mark | None:
    """Returns the mark in a line, or None if it is malformed."""
    try:
        told = parse_line(line)
        calls = tuple(Call(int(n), int(c), str(t), int(p)) for n, c, t, p in told.pop("calls"))
        return Mark(calls=calls, **told)
    except (KeyError, TypeError, ValueError):
        return None


def tell(joined: Job, text: str) -> None:
    """Publishes the mark of this process."""
    place = f"{_PLACE}/{joined.process_id}/mark"
    joined.client.key_value_set(place, text, allow_overwrite=True)


def hear(joined: Job) -> dict[int, Mark]:
    """Returns the marks of the other processes, by process."""
    return listen(joined)[0]


def listen(joined: Job, process: int | None = None) -> tuple[dict[int, Mark], str | None]:
    """Returns the marks of the other processes, or of one, and the cause if one has exited early.

    The cause stands beside the mark of process 0.
    """
    place = _PLACE if process is None else f"{_PLACE}/{process}"
    told = dict(joined.client.key_value_dir_get(place))
    cause = told.pop(CAUSE, None)
    marks = {int(key.split("/")[-2]): parse_mark(line) for key, line in told.items()}
    return {i: m for i, m in marks.items() if m is not None and i != joined.process_id}, cause


def find_difference(own: Mark, ledger: Ledger, other: Mark) -> tuple[str, str] | None:
    """Returns what the first call in which two processes differ is here, and there.

    None if one is merely behind the other, as far as is known.
    """
    mine = {call.number: call for call in own.calls}
    for i, theirs in enumerate(other.calls):
        ours = mine.get(theirs.number) or ledger.find(theirs.number)
        if ours is not None and ours.checksum != theirs.checksum:
            is_first = i > 0 or theirs.number == 1
            where = f"call {theirs.number}" + ("" if is_first else ", or one before")
            return f"{where}: {_tell_apart(ours, theirs)}", f"{where}: {_tell_apart(theirs, ours)}"
    return None


def _tell_apart(call: Call, other: Call) -> str:
    """Returns a call's text, with its program's checksum if the texts are equal."""
    if call.text != other.text or call.program == other.program:
        return call.text
    return f"{call.text}, program {call.program:08x}"
