"""Ctrl-C waits until what was begun is stored, and ends every wait.

Python handles SIGINT between any two bytecodes of the main thread, so KeyboardInterrupt may come
between the call that donates the arrays of a step and the line that stores their successors. While
`interrupts` are held, a handler of ours only notes the signal; `let_go` hands it to the handler
that was there, which raises as ever. That is SIGINT as Python delivers it: handlers of other
signals run as always, and so do exceptions that are put into a thread.
"""

from __future__ import annotations

import importlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]
_SIGINT = int(signal.SIGINT)
#: The functions of `signal` look for enums, in Python: 2 us.
_signal = importlib.import_module("_signal")


class _Held:
    """A handler of SIGINT that waits while interrupts are held, before the `former` one.

    An object for each handler that it stands before: who exchanges handlers for a while puts back
    the one that was there, which is ours, and it still leads to theirs.
    """

    __slots__ = ("former",)

    def __init__(self, former: _Handler):
        self.former = former

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if interrupts.depth:
            interrupts.waiting = self.former, number, frame
        else:
            self.former(number, frame)


class Interrupts:
    """Holds back Ctrl-C in the main thread, the only one in which Python handles signals.

    `depth` counts how many times it is held; `waiting` is the handler of a signal that came
    meanwhile, with its arguments.
    """

    __slots__ = ("_main", "depth", "waiting")

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self.depth = 0
        self.waiting: tuple[_Handler, int, FrameType | None] | None = None

    def hold(self) -> bool:
        """Begins a time without Ctrl-C; returns whether `let_go` has to end it."""
        if threading.get_ident() != self._main:
            return False
        if type(handler := _signal.getsignal(_SIGINT)) is not _Held:  # users may set theirs
            if callable(handler):  # else Ctrl-C is ignored, ends the process, or stays in C
                _signal.signal(_SIGINT, _Held(handler))
        self.depth += 1  # last: a signal that came before has raised, and nothing is held
        return True

    def let_go(self) -> None:
        """Ends the time that `hold` began; raises what a signal in it was to raise."""
        self.depth -= 1
        if self.waiting is not None and self.depth == 0:
            (former, number, frame), self.waiting = self.waiting, None
            former(number, frame)

    @contextmanager
    def held(self) -> Generator[None]:
        """A context in which Ctrl-C waits."""
        waits = self.hold()
        try:
            yield
        finally:
            if waits:
                self.let_go()


interrupts = Interrupts()


# -- waits for what another thread does ----------------------------------------


class Waiters:
    """Lets threads wait for a condition; whoever changes something rings afterwards.

    `threading.Condition` is written in Python, so a signal may leave its lock held, or make
    it raise "release unlocked lock" instead of KeyboardInterrupt. A queue implemented in C
    has no such windows: a signal ends a wait, and leaves nothing behind. Each waiter has its
    own queue of rings, so none takes those of another, and each may wait for another condition.
    """

    def __init__(self) -> None:
        self._waiting: dict[queue.SimpleQueue[None], Callable[[], object]] = {}

    def ring(self) -> None:
        """Wakes the waiters whose condition holds.

        Takes no lock: a ring may come from a garbage collection, at any line of any thread.
        """
        # Of a copy: iterating may run the garbage collector, whose finalizers let others in.
        for rings, is_so in self._waiting.copy().items():
            if is_so():
                rings.put(None)

    def wait_until(self, is_so: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits until ``is_so()``; returns False if `timeout` seconds pass without it.

        The condition takes no lock, since any thread may call it.
        """
        if is_so():
            return True
        rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        ends = None if timeout is None else time.monotonic() + timeout
        try:
            self._waiting[rings] = is_so  # before checking again, so that no change is missed
            while not is_so():
                rings.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
        except queue.Empty:
            return bool(is_so())
        finally:
            self._waiting.pop(rings, None)
        return True
