"""Calls that a signal does not stop half-way."""

from __future__ import annotations

import concurrent.futures
import contextvars
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class UninterruptedCalls:
    """Calls functions on a thread of its own, one after the other.

    A signal (Ctrl-C) raises in the main thread: there it ends the wait for a call, which
    itself goes on to its end. The next call waits for it. In the midst of a save, orbax
    leaves a step that looks complete and is not.
    """

    def __init__(self) -> None:
        self._thread: concurrent.futures.Executor | None = None

    def call(self, fn: Callable[[], T]) -> T:
        """Returns ``fn()``."""
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "distjax-uninterrupted")
        return self._thread.submit(fn).result()

    def close(self) -> None:
        """Ends the thread when what was called is done; a later call starts another."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()


def call_uninterrupted(fn: Callable[[], T]) -> T:
    """Returns ``fn()``, called on a thread that no signal reaches, in this thread's context.

    A signal that raises in the main thread ends the wait for the call, not the call.
    """
    context = contextvars.copy_context()
    with concurrent.futures.ThreadPoolExecutor(1, "distjax-call") as thread:
        return thread.submit(context.run, fn).result()
