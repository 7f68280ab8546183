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
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import io_callback

from distjax._src.cluster.events import record_failure
from distjax._src.cluster.exits import (
    DIFFERENT,
    STUCK,
    UNCAUGHT,
    begin_to_end,
    departure_text,
    error_text,
    exit_code,
    is_interactive,
    leave,
    parse_departure,
    print_error,
    print_stacks,
)
from distjax._src.cluster.job import Job
from distjax._src.cluster.ledger import (
    Call,
    Ledger,
    Mark,
    Token,
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
from distjax.errors import as_part, message

_PERIOD, _LONGEST_PERIOD = 0.25, 2.0
#: How many marks process 0 handles per second.
_MARKS_PER_SECOND = 128
#: How often in `step_deadline` a process shows that its Python runs.
_BEATS = 4
#: A launch that has not returned for this long, and for this many looks, is running, not refused.
_BLOCKED_SECONDS, _BLOCKED_LOOKS = 2.0, 3
_STOP_SECONDS = 3.0
#: How long a launch whose callback has raised may take to end with that error.
_FAILED_SECONDS = 2.0
#: How long this process may run its `finally` blocks once another has exited; less than process 0
#: stays.
_UNWIND_SECONDS = 1.5
#: How many of the processes that are behind to name in a text.
_NUM_NAMED = 8


class Watch:
    """The watch of this process.

    Args:
      joined: the job.
      exit_status: called when another process has exited; returns the exit code that this one
        keeps, or 0 to take the other's.
      calls: the ledger of this process.
    """

    def __init__(self, joined: Job, exit_status: Callable[[], int], calls: Ledger = ledger):
        self._job, self._calls = joined, calls
        self._period = min(max(_PERIOD, joined.num_processes / _MARKS_PER_SECOND), _LONGEST_PERIOD)
        self._thread = threading.Thread(target=self._run, name="distjax-watch", daemon=True)
        self._stopped = threading.Event()
        self._is_at_end = self._has_spoken = False
        self._exit_status, self._unwinding = exit_status, Unwinding()
        self._told = ""
        self._starting: tuple[object, float, int] = None, 0.0, 0  # what, since when, looks
        self._awaited: tuple[int, Token, float] | None = None  # a launch, its token, since when
        self._excused = 0.0  # when a process that others wait for was last seen at work
        self._heard: dict[int, tuple[Mark, float]] = {}  # the marks of such processes, since when
        self._looked: float | None = None  # when it looked last
        self._pause = 0.0  # the longest between two looks since a callback has raised
        self._has_suspect = False  # whether a launch has been in flight since

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def come_to_the_end(self) -> None:
        """Records that this process makes no more calls."""
        self._is_at_end = True

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
        blocked = self._find_blocked(now)
        at = [phase for phase in phases() if now - phase.since <= self._job.timeouts.phase]
        raising = self._unwinding.look(self._calls.count)
        beat = int(now * _BEATS / self._job.timeouts.step_deadline)
        own = mark_of(self._calls, at, blocked, self._is_at_end, raising, beat)
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
        self._end_if_callback_failed(now, own, blocked)
        self._end_if_stuck(now, own, blocked)
        self._end_if_phase_overdue(now)

    # -- programs that do not complete ----------------------------------------

    def _find_blocked(self, now: float) -> Call | None:
        """Returns a launch that runs in its launching thread, as on one CPU device."""
        starting, (former, since, looks) = self._calls.starting, self._starting
        if starting is None or starting is not former or _is_at_slow_work():
            self._starting = starting, now, 1
            return None
        self._starting = starting, since, looks + 1
        is_blocked = now - since >= _BLOCKED_SECONDS and looks >= _BLOCKED_LOOKS
        return self._calls.find_blocked() if is_blocked else None

    def _find_awaited(self, now: float, blocked: Call | None) -> tuple[int, float] | None:
        """Returns (number, waiting since) of a launch that has not completed.

        It is the first one in flight: a device runs them one after another, and the deadline of
        each starts when the previous one completes.
        """
        if self._awaited is None or _is_ready(self._awaited[1]):
            running = [(n, t) for n, t in self._calls.find_launched() if not _is_ready(t)]
            self._awaited = (*running[0], now) if running else None
        if self._awaited is not None:
            return self._awaited[0], self._awaited[2]
        return (blocked.number, self._starting[1]) if blocked is not None else None

    def _end_if_stuck(self, now: float, own: Mark, blocked: Call | None) -> None:
        """Ends the job if a launch takes too long, unless a process it needs is at work."""
        awaited, deadline = self._find_awaited(now, blocked), self._job.timeouts.step_deadline
        if awaited is None or now - awaited[1] <= deadline:
            return
        number, since = awaited
        marks = {**hear(self._job), self._job.process_id: own}
        behind = {i: mark for i, mark in marks.items() if mark.count < number}
        if any(mark.is_busy and self._is_alive(i, mark, now) for i, mark in behind.items()):
            self._excused = now
        elif now - max(since, self._excused) > deadline:
            self._end(STUCK, self._stuck_text(number, marks))

    def _is_alive(self, process: int, mark: Mark, now: float) -> bool:
        """Returns whether a process has reported within the deadline.

        One that C code keeps from running Python (it holds the lock of the interpreter) was at
        work when it last did, for ever.
        """
        former, since = self._heard.get(process, (None, now))
        if former is None or (former, former.beat) != (mark, mark.beat):
            since = now
        self._heard[process] = mark, since
        return now - since <= self._job.timeouts.step_deadline

    def _end_if_callback_failed(self, now: float, own: Mark, blocked: Call | None) -> None:
        """Ends the job if a callback has raised, and the launch in flight then does not end.

        One that ends raises the error where its results are read.
        """
        failed, awaited = failed_callback(), self._find_awaited(now, blocked)
        pause, self._looked = now - (now if self._looked is None else self._looked), now
        self._pause = pause if failed is None else max(self._pause, pause)
        self._has_suspect &= failed is not None
        if failed is None or any(not phase.has_bound for phase in phases()):
            return  # it may be of a lone program
        if awaited is None:
            # The program may not have been recorded yet: it runs before its launch returns.
            is_recorded = self._has_suspect and self._calls.starting is None
            is_over = is_recorded or now - failed.at > max(_FAILED_SECONDS, self._pause)
        else:
            # A launch is in flight since the look that has first seen it, or since the one before.
            self._has_suspect = True
            is_over = awaited[1] > failed.at + max(_FAILED_SECONDS, self._pause)
        if is_over:
            forget_failed()
        if is_over or awaited is None or now - max(failed.at, awaited[1]) <= _FAILED_SECONDS:
            return
        marks = hear(self._job).values()
        if all(mark.count >= awaited[0] for mark in marks):  # else it waits for those
            print_error("".join(traceback.format_exception(failed.error)))
            text = error_text(failed.error)
            self._end(UNCAUGHT, self._callback_text(awaited[0], text), text)

    def _end_if_phase_overdue(self, now: float) -> None:
        bound = self._job.timeouts.phase
        for phase in phases():
            if phase.is_work and phase.has_bound and now - phase.since > bound:
                self._end(STUCK, self._slow_text(phase.what))

    # -- the end --------------------------------------------------------------

    def _end(self, code: int, text: str, cause: str | None = None) -> None:
        """Ends all processes; in an interactive session, only prints the problem once.

        Args:
          code: with which all of them end; with a `cause`, this one.
          text: what is printed here, and by the others unless there is a `cause`.
          cause: an error of this process, by which the others are lost.
        """
        if is_interactive():
            self._say(text)
            return
        begin_to_end()
        print_error(text)
        record_failure(code, cause or text)
        if code == STUCK:
            print_stacks()
        if cause is not None:
            leave(self._job, code, cause)
        leave(self._job, code, text, code)

    def _say(self, text: str) -> None:
        if not self._has_spoken:
            print_error(text)
        self._has_spoken = True

    def _follow(self, cause: str) -> None:
        """Ends this process because another one has exited; in an interactive session, says so.

        Args:
          cause: the line by which that one, or the first of several, has told the others.
        """
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
        # This process may be about to end by itself.
        own = self._unwinding.wait(self._calls.count, _UNWIND_SECONDS)
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
        own = self._job.name_process(self._job.process_id)
        behind = [i for i in sorted(marks) if marks[i].count < number]
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

    def _slow_text(self, what: str) -> str:
        return message(
            f"{what} needs to be done within phase_timeout ({self._job.timeouts.phase:g} s)",
            got=f"no end of it on {self._job.name_process(self._job.process_id)}",
            why="the others wait for this process meanwhile",
            fix="look at its threads, which are printed here; if it takes longer: "
            "dj.initialize(..., phase_timeout=7200)",
        )


def _is_at_slow_work() -> bool:
    """Returns whether a thread is at slow work, other than programs run alone."""
    return any(phase.is_work and phase.has_bound for phase in phases())


def _is_ready(token: Token) -> bool:
    try:
        return token.is_ready()
    except RuntimeError:  # deleted along with its backend
        return True


# -- what the main thread is raising ---------------------------------------------
# The others of a job may end because of it before it is printed, and their end would end this
# process too. Its own error says more than theirs, so it is given a moment, and then printed.

_UNWIND_PERIOD = 0.02
#: Between two `finally` blocks, and on the way to the hook that prints it, no error is handled.
_QUIET_SECONDS = 0.2


class Unwinding:
    """Tells a `finally` block, or a `with` that is left, from work in an `except` block.

    Both have an exception that is being handled. In the latter the program goes on: it makes calls.
    """

    def __init__(self) -> None:
        # The exception's id, and the number of calls when it was first seen.
        self._seen: tuple[int, int] | None = None

    def look(self, num_calls: int) -> BaseException | None:
        """Returns what the main thread is raising; `num_calls` is the ledger's current count."""
        error = _handled()
        if error is None:
            self._seen = None
            return None
        if self._seen is None or self._seen[0] != id(error):
            self._seen = id(error), num_calls
        return error if num_calls - self._seen[1] <= 1 else None  # one may be in `finally`

    def wait(self, num_calls: int, seconds: float) -> BaseException | None:
        """Waits until the main thread has raised; returns what it is still raising after that."""
        quiet = time.monotonic()
        deadline = quiet + seconds
        while (now := time.monotonic()) < deadline:
            if self.look(num_calls) is not None:
                quiet = now
            elif now - quiet > _QUIET_SECONDS:
                return None
            time.sleep(_UNWIND_PERIOD)
        return self.look(num_calls)


def _handled() -> BaseException | None:
    """Returns the error that the main thread is handling; ends and interrupts of loops are none."""
    active = sys._current_exceptions()  # pyright: ignore[reportPrivateUsage]
    found: Any = active.get(threading.main_thread().ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    is_loop = isinstance(error, (StopIteration, StopAsyncIteration))
    return error if isinstance(error, (Exception, KeyboardInterrupt)) and not is_loop else None


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
      at: when it was logged, by `time.monotonic`.
    """

    error: BaseException
    at: float


_failed: list[FailedCallback] = []


def watch_callbacks() -> None:
    """From now on, records the latest exception in a callback."""
    for name in dict.fromkeys(callback.__module__ for callback in _CALLBACKS):
        # A filter, not a handler: with a handler, Python would no longer print what JAX logs.
        logging.getLogger(name).addFilter(_record)


def failed_callback() -> FailedCallback | None:
    """Returns the first exception in a callback since `forget_failed`."""
    return _failed[0] if _failed else None


def forget_failed() -> None:
    """Forgets it: the program has ended, and its error is raised where its results are read."""
    _failed.clear()


def _record(record: logging.LogRecord) -> bool:
    error = sys.exc_info()[1]
    if error is not None and record.exc_info and not _failed:
        _failed.append(FailedCallback(error, time.monotonic()))
    return True
