"""Phases: slow work of this process alone, reported to those waiting for it.

A process that compiles, reads data or writes a checkpoint is not stuck, even if the others wait in
a program that it has not launched yet. Each phase has its own time limit, `phase_timeout`.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

from distjax.errors import describe_value, message


class Phase(NamedTuple):
    """What a thread is doing.

    Attributes:
      what: a description for people, such as "compiling step".
      since: when it began, by `time.monotonic`.
      is_work: whether the process itself is busy; otherwise it waits for others, which has its own
        timeout.
      has_bound: whether the job ends if it takes longer than `phase_timeout`.
    """

    what: str
    since: float
    is_work: bool
    has_bound: bool = True


#: The longest pause between programs of this process alone, in seconds, e.g. to read data.
_PAUSE = 10.0

_by_thread: dict[int, Phase] = {}
_count_phase = itertools.count(1).__next__
_num_phases = [0]


def phase(what: str) -> contextlib.AbstractContextManager[None]:
    """Tells the other processes that this one is at slow work, not stuck.

    In a multi-process job, the others wait for this process at the next meeting or program:
    for `meeting_timeout` or `step_deadline`, and while it is in a phase, for up to
    `phase_timeout` (see `initialize`). Compiling, waiting for data, checkpoints and programs
    that this process runs alone are phases automatically.

    Args:
      what: what the process is doing, for the others' errors.

    Raises:
      TypeError: `what` is not a string.

    Example:
      >>> if jax.process_index() == 0:
      ...     with dj.phase("drawing samples"):
      ...         pass  # minutes of Python
    """
    _require_text(what)  # else the watch would fail, and end the job, when reporting it
    return _phase(what, is_work=True)


def _require_text(what: object) -> None:
    if not isinstance(what, str):
        raise TypeError(
            message(
                "dj.phase needs a string",
                got=describe_value(what),
                why="it says what this process is doing, in the errors of the others",
                fix="with dj.phase('drawing samples'):",
            )
        )


def waiting(what: str) -> contextlib.AbstractContextManager[None]:
    """Marks this thread as waiting for others, which has its own timeout."""
    return _phase(what, is_work=False)


@contextlib.contextmanager
def _phase(what: str, is_work: bool) -> Generator[None]:
    thread = threading.get_ident()
    outer = _by_thread.get(thread)
    _by_thread[thread] = Phase(what, time.monotonic(), is_work)
    if is_work:
        _num_phases[0] = _count_phase()
    try:
        yield
    finally:
        if outer is None:
            _by_thread.pop(thread, None)
        else:
            _by_thread[thread] = outer


class _LonePrograms:
    """Programs that this process launches alone, such as evaluation on its devices.

    Each takes only a moment, so they count as one phase for as long as they follow one another
    without a program of all processes in between. It has no limit of its own, as this process may
    train alone; but the others wait for it no longer than for any other phase.
    """

    def __init__(self) -> None:
        self._name, self._since, self._latest, self._num_calls = "", 0.0, -math.inf, 0

    def record(self, name: str, num_calls: int) -> None:
        """Records a launch; `num_calls` is the ledger's current count."""
        now = time.monotonic()
        if num_calls != self._num_calls or now - self._latest > _PAUSE:
            self._since, self._num_calls = now, num_calls
        self._name, self._latest = name, now

    def phases(self) -> Iterator[Phase]:
        """Yields the current phase, if any."""
        if time.monotonic() - self._latest <= _PAUSE:
            yield Phase(f"running {self._name} alone", self._since, True, has_bound=False)


lone_programs = _LonePrograms()


def phases() -> tuple[Phase, ...]:
    """Returns what the threads of this process are doing."""
    return *_by_thread.values(), *lone_programs.phases()


def num_phases() -> int:
    """Returns how many phases of work this process has begun."""
    return _num_phases[0]
