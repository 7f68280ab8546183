"""Phases: slow work of this process alone, of which the others know while they wait for it.

A process that compiles, reads data or writes a checkpoint is not stuck, though the others may wait
in a program that it has not launched. Each phase has a bound of its own, `phase_timeout`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from typing import NamedTuple


class Phase(NamedTuple):
    """What a thread is at.

    Attributes:
      what: "compiling step", for people.
      since: when it began, by `time.monotonic`.
      is_work: whether the process itself is busy; else it waits for others, which has a bound
        elsewhere.
    """

    what: str
    since: float
    is_work: bool


_by_thread: dict[int, Phase] = {}


@contextlib.contextmanager
def phase(what: str, *, is_work: bool = True) -> Generator[None]:
    """Says what this thread is at meanwhile."""
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


def phases() -> tuple[Phase, ...]:
    """Returns what the threads of this process are at."""
    return tuple(_by_thread.values())
