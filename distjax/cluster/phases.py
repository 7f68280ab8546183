"""Phases: slow work of this process alone, of which the others know while they wait for it.

A process that compiles, reads data or writes a checkpoint is not stuck, though the others may wait
in a program that it has not launched. Each phase has a bound of its own, `phase_timeout`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Generator, Iterator
from typing import NamedTuple

from distjax.errors import describe_value, message


class Phase(NamedTuple):
    """What a thread is at.

    Attributes:
      what: "compiling step", for people.
      since: when it began, by `time.monotonic`.
      is_work: whether the process itself is busy; else it waits for others, which has a bound
        elsewhere.
      has_bound: whether the job ends where it is longer than `phase_timeout`.
    """

    what: str
    since: float
    is_work: bool
    has_bound: bool = True


#: Seconds between two programs of one process alone, in which its Python reads data, say.
_PAUSE = 10.0

_by_thread: dict[int, Phase] = {}


def phase(what: str) -> contextlib.AbstractContextManager[None]:
    """Tells the other processes that this one is at slow work, and not stuck.

    In a job of several processes the others wait for this one at the next meeting or
    program: for `meeting_timeout` or `step_deadline`, and while it is in a phase for up to
    `phase_timeout` (see `initialize`). Compiling, waiting for data, checkpoints and programs
    that this process runs alone are phases without being named.

    Args:
      what: what the process is doing, for the errors of the others.

    Raises:
      TypeError: `what` is no text.

    Example:
      >>> if jax.process_index() == 0:
      ...     with dj.phase("drawing samples"):
      ...         pass  # minutes of Python
    """
    _require_text(what)  # else the watch would end the job when it tells the others
    return _phase(what, is_work=True)


def _require_text(what: object) -> None:
    if not isinstance(what, str):
        raise TypeError(
            message(
                "dj.phase needs a text",
                got=describe_value(what),
                why="it says what this process is at, in the errors of the others",
                fix="with dj.phase('drawing samples'):",
            )
        )


def waiting(what: str) -> contextlib.AbstractContextManager[None]:
    """Says that this thread waits for others meanwhile, which has a bound elsewhere."""
    return _phase(what, is_work=False)


@contextlib.contextmanager
def _phase(what: str, is_work: bool) -> Generator[None]:
    thread = threading.get_ident()
    outer = _by_thread.get(thread)
    _by_thread[thread] = Phase(what, time.monotonic(), is_work)
    try:
        yield
    finally:
        if outer is None:
            _by_thread.pop(thread, None)
        else:
            _by_thread[thread] = outer


class _OwnPrograms:
    """Programs that this process launches alone, as an evaluation on its own devices.

    Each is over in a moment, so they are one phase: as long as they come one after the other, and
    no program of all processes between them. It may last, as a training of this process alone
    does; the others wait for it no longer than for another phase.
    """

    def __init__(self) -> None:
        self._name, self._since, self._latest, self._num_calls = "", 0.0, -math.inf, 0

    def note(self, name: str, num_calls: int) -> None:
        """Notes a launch; `num_calls` is how many calls the ledger has."""
        now = time.monotonic()
        if num_calls != self._num_calls or now - self._latest > _PAUSE:
            self._since, self._num_calls = now, num_calls
        self._name, self._latest = name, now

    def phases(self) -> Iterator[Phase]:
        """Yields what they are at, if anything."""
        if time.monotonic() - self._latest <= _PAUSE:
            yield Phase(f"running {self._name} alone", self._since, True, has_bound=False)


own_programs = _OwnPrograms()


def phases() -> tuple[Phase, ...]:
    """Returns what the threads of this process are at."""
    return *_by_thread.values(), *own_programs.phases()
