"""The watch: a thread that finds differing, stuck or lost processes between meetings.

Each process reports its progress at fixed times rather than per call: at most four times a second,
less often if there are many processes. Process 0 reads all reports, and the others read that of
process 0, which takes a few messages per process. Beside the latter stands why a process has exited
early, if one has: then all exit. Calls are compared at equal numbers, so being
slow is not a difference. The thread starts nothing on a device and never waits for one: it only
checks whether the token of a launch is ready.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
from jax.experimental import io_callback

from distjax._src.cluster.job import Job, as_line, as_plain, parse_line, record_failure
from distjax._src.cluster.ledger import (
    CAUSE,
    Call,
    Ledger,
    Mark,
    as_text,
    find_difference,
    hear,
    ledger,
    listen,
    mark_of,
    phases,
    tell,
)
from distjax._src.cluster.meeting import difference_text
from distjax.errors import (
    AgreementError,
    ClusterError,
    PeerLostError,
    PreemptedError,
    StuckError,
    as_part,
    message,
)

_PERIOD, _LONGEST_PERIOD = 0.25, 2.0
#: How many marks process 0 handles per second.
_MARKS_PER_SECOND = 128
#: A launch that has not returned for this long is running, not refused.
_BLOCKED_SECONDS = 2.0
_STOP_SECONDS = 3.0
#: How long a launch whose callback has raised may take to end with that error.
_FAILED_SECONDS = 2.0
#: How long this process may run its `finally` blocks once another has exited; less than process 0
#: stays.
_UNWIND_SECONDS = 1.5
#: How many of the processes that are behind to name in a text.
_NUM_NAMED = 8


class _Awaited(NamedTuple):
    """The number of the first launch in flight, and since when it is that."""

    number: int
    since: float


class Watch:
    """The watch of this process; `exit_status` gives its own code, or 0 for that of the others."""

    def __init__(self, joined: Job, exit_status: Callable[[], int], calls: Ledger = ledger):
        self._job, self._calls = joined, calls
        self._period = min(max(_PERIOD, joined.num_processes / _MARKS_PER_SECOND), _LONGEST_PERIOD)
        self._thread = threading.Thread(target=self._run, name="distjax-watch", daemon=True)
        self._stopped = threading.Event()
        self._has_spoken = False
        self._exit_status, self._told = exit_status, ""
        self._awaited: _Awaited | None = None
        self._excused = 0.0  # when a process that others wait for was last seen at work

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # no answer: left to JAX
                self.look(time.monotonic())

    def look(self, now: float) -> None:
        """Reports this process's progress, checks the others', ends the job if needed."""
        self._find_awaited(now)
        blocked = self._find_blocked(now)
        at = [phase for phase in phases() if now - phase.since <= self._job.timeouts.phase_timeout]
        own = mark_of(self._calls, at, blocked, error_in_hand())
        if (text := as_text(own)) != self._told:
            tell(self._job, text)
            self._told = text
        marks, cause = listen(self._job, 0 if self._job.process_id else None)
        if cause is not None:
            self._follow(cause)
        for process, other in marks.items():
            difference = find_difference(own, self._calls, other)
            if difference is not None:
                self._end(DIFFERENT, self._difference_text(process, *difference))
        self._end_if_callback_failed(now)
        self._end_if_stuck(now, own)
        self._end_if_phase_overdue(now)

    # -- programs that do not complete ----------------------------------------

    def _find_awaited(self, now: float) -> None:
        """Finds the launch that has not completed.

        It is the first one in flight: a device runs them one after another, and the deadline of
        each starts when the previous one completes.
        """
        number, known = self._calls.find_in_flight(), self._awaited
        if number is None:
            self._awaited = None
        elif known is None or known.number != number:
            self._awaited = _Awaited(number, now)

    def _find_blocked(self, now: float) -> Call | None:
        """Returns a launch that runs in its launching thread, as on one CPU device."""
        blocked, awaited = self._calls.find_blocked(), self._awaited
        if blocked is None or awaited is None or awaited.number != blocked.number:
            return None
        is_at_work = any(phase.is_work for phase in phases())  # it compiles
        return blocked if now - awaited.since >= _BLOCKED_SECONDS and not is_at_work else None

    def _end_if_stuck(self, now: float, own: Mark) -> None:
        """Ends the job if a launch takes too long, unless a process it needs is at work."""
        awaited, deadline = self._awaited, self._job.timeouts.step_deadline
        if awaited is None or now - awaited.since <= deadline:
            return
        marks = {**hear(self._job), self._job.process_id: own}
        is_excused = any(m.is_busy for m in marks.values() if m.count < awaited.number)
        # One that C code holds up says nothing more.
        longest = deadline + self._job.timeouts.phase_timeout
        if is_excused and now - awaited.since <= longest:
            self._excused = now
        elif now - max(awaited.since, self._excused) > deadline:
            self._end(STUCK, self._stuck_text(awaited.number, marks))

    def _end_if_callback_failed(self, now: float) -> None:
        """Ends the job if a callback has raised, and the launch then in flight does not end.

        One that ends raises the error where its results are read.
        """
        failed, awaited = failed_callback(), self._awaited
        if failed is None:
            return
        if awaited is None or awaited.number > failed.number:
            forget_failed()
        elif now - max(failed.at, awaited.since) > _FAILED_SECONDS:
            marks = hear(self._job).values()
            if all(mark.count >= awaited.number for mark in marks):  # else it waits for those
                print_error("".join(traceback.format_exception(failed.error)))
                text = error_text(failed.error)
                self._end(UNCAUGHT, self._callback_text(awaited.number, text), text)

    def _end_if_phase_overdue(self, now: float) -> None:
        bound = self._job.timeouts.phase_timeout
        for phase in phases():
            if phase.is_work and now - phase.since > bound:
                own, name = self._job.process_id, self._job.name_process
                text = message(
                    f"{phase.what} needs to be done within phase_timeout ({bound:g} s)",
                    got=f"no end of it on {name(own)}",
                    why="the others wait for this process meanwhile",
                    fix="look at its threads, which are printed here; if it takes longer: "
                    "dj.initialize(..., phase_timeout=7200)",
                )
                self._end(STUCK, text)

    # -- the end --------------------------------------------------------------

    def _end(self, code: int, text: str, cause: str | None = None) -> None:
        """Ends all processes with `code`; in an interactive session, only prints the problem once.

        With a `cause`, an error of this process, the others are lost by it and say that.
        """
        if is_interactive():
            self._say(text)
            return
        begin_to_end()
        print_error(text)
        own = self._exit_status() or code
        record_failure(own, cause or text)
        if code == STUCK:
            print_stacks()
        if cause is not None:
            leave(self._job, own, cause)
        leave(self._job, own, text, code)

    def _say(self, text: str) -> None:
        if not self._has_spoken:
            print_error(text)
        self._has_spoken = True

    def _follow(self, cause: str) -> None:
        """Ends this process because another one has exited; in an interactive session, says so."""
        left = parse_departure(cause)
        if left is None or left.process == self._job.process_id:
            return
        said, (_, code, text) = departure_text(self._job, left), left
        if is_interactive():
            self._say(said)
            return
        if code == STUCK:
            print_stacks()
        code = self._exit_status() or code
        own = _await_error(_UNWIND_SECONDS)  # this process may be about to end by itself
        begin_to_end()
        if own is not None:
            print_error("".join(traceback.format_exception(own)))
            code, text = exit_code(own), error_text(own)
        print_error(said)
        record_failure(code, text if own is not None else said, own)
        leave(self._job, code, text)

    def _difference_text(self, process: int, own: str, other: str) -> str:
        what = "what they have launched"
        if process == 0:
            return difference_text(self._job, [self._job.process_id], what, repr(other), repr(own))
        return difference_text(self._job, [process], what, repr(own), repr(other))

    def _stuck_text(self, number: int, marks: dict[int, Mark]) -> str:
        call = self._calls.find(number) or self._calls.find_blocked()
        own_id, own = self._job.process_id, self._job.name_process(self._job.process_id)
        behind = [i for i in sorted(marks) if i != own_id and marks[i].count < number]
        where = [f"{self._job.name_process(i)}: {marks[i].describe()}" for i in behind]
        got = "; ".join(where[:_NUM_NAMED]) or "no process that is behind"
        return message(
            f"call {number} of {own} ({call.text if call else 'a launch'}) needs to complete "
            f"within step_deadline ({self._job.timeouts.step_deadline:g} s)",
            got=f"{got}, of {len(marks)} processes",
            why="a program over all processes waits until each of them has launched its part",
            fix="look at what those processes do: each prints its threads. If steps take longer: "
            "dj.initialize(..., step_deadline=3600); for other work of one process: with "
            "dj.phase('a picture'): around it",
        )

    def _callback_text(self, number: int, error: str) -> str:
        call = self._calls.find(number) or self._calls.find_blocked()
        return message(
            f"a callback in {call.text if call else 'a launch'} needs to return",
            got=as_part(error),
            why="the program does not complete without it, and the other processes wait in it",
            fix="look at its traceback, which is printed here; what may fail is caught in the "
            "callback: def callback(x): try: ... except Exception: return x",
        )


# -- what the main thread is raising ---------------------------------------------
# The others of a job may end because of it before it is printed, and their end would end this
# process too. Its own error says more than theirs, so it is given a moment, and then printed.

_UNWIND_PERIOD = 0.02


def error_in_hand() -> BaseException | None:
    """Returns what the main thread handles; ends and interrupts of loops are none."""
    active = sys._current_exceptions()  # pyright: ignore[reportPrivateUsage]
    found: Any = active.get(threading.main_thread().ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    is_loop = isinstance(error, (StopIteration, StopAsyncIteration))
    return error if isinstance(error, (Exception, KeyboardInterrupt)) and not is_loop else None


def _await_error(seconds: float) -> BaseException | None:
    """Returns what the main thread still handles after `seconds`: in `finally`, or `except`."""
    deadline = time.monotonic() + seconds
    while (error := error_in_hand()) is not None and time.monotonic() < deadline:
        time.sleep(_UNWIND_PERIOD)
    return error


# -- host callbacks that raise ---------------------------------------------------
# A program whose callback raises fails. With several devices in a process it may never end, so that
# nobody reads its error: what follows the callback on that device does not run, and the process's
# other devices, and all other processes, wait for it in a collective. JAX logs the error at once,
# by loggers named after its modules, and that is the only place where it can be learned of.

_CALLBACKS = (jax.pure_callback, io_callback, jax.debug.callback)


class FailedCallback(NamedTuple):
    """An exception in a callback.

    Attributes:
      error: the exception.
      number: of the latest launch at that time.
      at: when it was logged, by `time.monotonic`.
    """

    error: BaseException
    number: int
    at: float


_failed: list[FailedCallback] = []


def watch_callbacks() -> None:
    """From now on, records the latest exception in a callback."""
    for name in dict.fromkeys(callback.__module__ for callback in _CALLBACKS):
        # A filter, not a handler: with a handler, Python would no longer print what JAX logs.
        logging.getLogger(name).addFilter(_record)


def failed_callback() -> FailedCallback | None:
    """Returns the first exception since `forget_failed` beside a launch in flight."""
    return _failed[0] if _failed else None


def forget_failed() -> None:
    """Forgets it: the program has ended, and its error is raised where its results are read."""
    _failed.clear()


def _record(record: logging.LogRecord) -> bool:
    error = sys.exc_info()[1]
    if error is not None and record.exc_info and not _failed and ledger.find_in_flight():
        number = (ledger.starting is not None) + ledger.count  # it may run before that returns
        _failed.append(FailedCallback(error, number, time.monotonic()))
    return True


# -- how a process exits ---------------------------------------------------------
# With a code that says why, once the others have heard of it: a collective would notify only the
# neighbors of a lost process, and only those inside it. One that exits early says so in the
# coordination service, under a single key that the watch of every process looks at. The first one
# is the cause; errors that the others then run into are not. Process 0 hosts that service, and JAX
# aborts the others as soon as it is gone. So all acknowledge that they have read the key, and
# process 0 exits last, after a bounded wait.

UNCAUGHT, PEER_LOST, STUCK, DIFFERENT = 70, 71, 76, 77

#: Exit codes of uncaught exceptions; the first matching row counts.
_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (AgreementError, DIFFERENT),
    (PeerLostError, PEER_LOST),
    (PreemptedError, 75),
    (StuckError, STUCK),
    (ClusterError, 78),
    (KeyboardInterrupt, 130),
)

#: How the note begins by which JAX says that it has removed frames from a traceback.
_NOTE_OF_JAX = "\n--------------------\nFor simplicity, JAX "

#: JAX error messages that mean another process is gone: from gloo's sockets, NCCL, the coordinator.
#: They begin with a status; reading a value raises them as ValueError.
_GONE = re.compile(
    r"[A-Z_]+: .*(gloo|connection (closed|reset|refused)|socket closed|broken pipe"
    r"|coordination service|remote process exited)",
    re.IGNORECASE | re.DOTALL,
)


def exit_code(error: BaseException) -> int:
    """Returns the exit code of a process of a job after `error`."""
    cause: BaseException | None = error
    while cause is not None:
        is_jax = isinstance(cause, (jax.errors.JaxRuntimeError, ValueError))
        text = "".join(traceback.format_exception_only(cause))  # `str` of a user's class may raise
        if is_jax and _GONE.match(text.partition(": ")[2]):
            return PEER_LOST
        cause = cause.__cause__
    return next((code for kind, code in _CODES if isinstance(error, kind)), UNCAUGHT)


def error_text(error: BaseException) -> str:
    """Returns an error's type and text, as the other processes are told it."""
    return "".join(traceback.format_exception_only(error)).partition(_NOTE_OF_JAX)[0].strip()


def end_at_once(code: int) -> NoReturn:
    """Ends this process without `atexit` callbacks, after flushing its outputs."""
    flush_outputs()
    os._exit(code)


def flush_outputs() -> None:
    """Flushes stdout, stderr and logging, whose handlers it closes."""
    for flush in (logging.shutdown, lambda: sys.stdout.flush(), lambda: sys.stderr.flush()):
        with contextlib.suppress(Exception):  # a closed output must not change the exit code
            flush()


def print_error(text: object) -> None:
    """Prints to stderr; one that is closed must not keep the process from ending."""
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)


def print_stacks() -> None:
    """Prints the stack of every thread of this process, if stderr is open."""
    flush_outputs()
    for output in (sys.stderr, 2):  # the second if stderr was replaced by something not a file
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(output)
            return


def is_interactive() -> bool:
    """Returns whether this is an interactive session, which exceptions do not end."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return True
    return hasattr(sys, "ps1") or bool(sys.flags.interactive or sys.flags.inspect)


# -- leaving a job ---------------------------------------------------------------

_LEFT = "distjax/departure/left"
#: How long a process may delay its exit for the others' sake: they look every two seconds at least.
_LEAVE_SECONDS = 5.0
#: How long process 0 stays after the last acknowledgment, so that the others can exit.
_LAST_SECONDS = 0.3

#: Acquired for good by the one thread that ends this process; again if that has failed half-way.
_end = threading.RLock()


def begin_to_end() -> None:
    """Returns in the first thread that wants to end the process; blocks all others."""
    _end.acquire()


class Departure(NamedTuple):
    """Which process has left, the code and the text for the others."""

    process: int
    code: int
    text: str


def parse_departure(line: str) -> Departure | None:
    """Returns the departure that a line tells of, or None."""
    match parse_line(line):
        case {"process": int(process), "code": int(code), "text": str(text)}:
            return Departure(process, code, text)
        case _:
            return None


def departure_text(joined: Job, left: Departure) -> str:
    """Returns what this process says when it ends because another one has left."""
    return message(
        f"{joined.name_process(joined.process_id)} needs all processes of its job",
        got=f"the end of {joined.name_process(left.process)}: {as_part(as_plain(left.text, 2000))}",
        why="no collective can be complete without it",
        fix="look at what that process said; start the job again",
    )


def leave(
    joined: Job, code: int, text: str, others_code: int = PEER_LOST, *, says_who: bool = False
) -> NoReturn:
    """Ends this process with `code`, and the others with `others_code` and `text`.

    Call after `begin_to_end`. If another process has already left, its code and text are
    the ones that the others get; and `says_who`, this one says so.
    """
    flush_outputs()  # once it has announced its exit, JAX may abort this process
    told = joined, text, others_code, says_who
    telling = threading.Thread(target=_tell, args=told, daemon=True)
    telling.start()
    telling.join(_LEAVE_SECONDS)  # an unresponsive coordinator must not block the exit
    end_at_once(code)


def _tell(joined: Job, text: str, others_code: int, says_who: bool) -> None:
    deadline = time.monotonic() + _LEAVE_SECONDS
    own, client = joined.process_id, joined.client
    cause = Departure(own, others_code, as_plain(text, 2000))
    try:
        client.key_value_set(CAUSE, as_line(cause._asdict()))
    except jax.errors.JaxRuntimeError:  # another process was first
        if says_who:
            _say_who(joined)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{_LEFT}/{own}", "", allow_overwrite=True)
        for other in range(joined.num_processes) if own == 0 else ():
            seconds = max(deadline - time.monotonic(), 0.001)
            client.blocking_key_value_get(f"{_LEFT}/{other}", int(seconds * 1000))
        if own == 0:
            time.sleep(_LAST_SECONDS)


def _say_who(joined: Job) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        left = parse_departure(joined.client.blocking_key_value_get(CAUSE, 1000))
        if left is not None:
            print_error(departure_text(joined, left))
