"""Ctrl-C waits until what was begun is stored.

Python handles SIGINT between any two bytecodes of the main thread, so KeyboardInterrupt may come
between the call that donates the arrays of a step and the line that stores their successors. While
`interrupts` are held, a handler of ours only notes the signal; `let_go` hands it to the handler
that was there, which raises as ever. That is SIGINT as Python delivers it: handlers of other
signals run as always, and so do exceptions that are put into a thread.
"""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports] (signal.getsignal looks for an enum: 2 us)
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any]
_SIGINT = int(signal.SIGINT)


class Interrupts:
    """Holds back Ctrl-C in the main thread, the only one in which Python handles signals."""

    __slots__ = ("_depth", "_former", "_handler", "_main", "_waiting")

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._depth = 0
        self._waiting: tuple[int, FrameType | None] | None = None
        self._former: _Handler = signal.default_int_handler
        self._handler: _Handler = self._on_interrupt

    def hold(self) -> bool:
        """Begins a time without Ctrl-C; returns whether `let_go` has to end it."""
        if threading.get_ident() != self._main:
            return False
        self._depth += 1
        if _signal.getsignal(_SIGINT) is not self._handler:  # a user may set one at any time
            try:
                self._install()
            except BaseException:  # a signal, while the handler of the user was still there
                self._depth -= 1
                raise
        return True

    def let_go(self) -> None:
        """Ends the time that `hold` began; raises what a signal in it was to raise."""
        self._depth -= 1
        if self._waiting is not None and self._depth == 0:
            waiting, self._waiting = self._waiting, None
            self._former(*waiting)

    @contextmanager
    def held(self) -> Generator[None]:
        """A context in which Ctrl-C waits."""
        waits = self.hold()
        try:
            yield
        finally:
            if waits:
                self.let_go()

    def _install(self) -> None:
        handler = _signal.getsignal(_SIGINT)
        if callable(handler):  # else Ctrl-C is ignored, ends the process, or is handled in C
            self._former = handler
            _signal.signal(_SIGINT, self._handler)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._waiting = number, frame
        else:
            self._former(number, frame)


interrupts = Interrupts()
