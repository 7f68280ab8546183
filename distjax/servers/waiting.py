"""Waiters: threads that wait until something is so."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable


class Waiters:
    """Lets threads wait until something is so; whoever changes it rings after the change.

    A ring is a call in C that takes no lock of Python's: it may come from a garbage
    collection, at any line of any thread. A signal (Ctrl-C) ends a wait, and leaves
    nothing behind. Each waiter has rings of its own, so none takes those of another.
    """

    def __init__(self) -> None:
        self._waiting: list[queue.SimpleQueue[None]] = []

    def ring(self) -> None:
        """Makes all who wait look again."""
        for rings in tuple(self._waiting):
            rings.put(None)

    def wait_until(self, is_so: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits until ``is_so()``; returns False after `timeout` seconds in which it never was."""
        if is_so():
            return True
        rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        ends = None if timeout is None else time.monotonic() + timeout
        self._waiting.append(rings)  # before it looks again: no change comes in between unheard
        try:
            while not is_so():
                rings.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
        except queue.Empty:
            return bool(is_so())
        finally:
            self._waiting.remove(rings)
        return True
