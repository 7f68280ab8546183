"""Waiters: threads that wait until something is so."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable


class Waiters:
    """Lets threads wait until something is so; whoever changes it rings after the change.

    Who rings looks for those who wait, and wakes whom it concerns. It takes no lock: a ring
    may come from a garbage collection, at any line of any thread. A signal (Ctrl-C) ends a
    wait, and leaves nothing behind. Each waiter has rings of its own, so none takes those of
    another.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], object], queue.SimpleQueue[None]]] = []

    def ring(self) -> None:
        """Wakes those for whom it is so."""
        for is_so, rings in tuple(self._waiting):
            if is_so():
                rings.put(None)

    def wait_until(self, is_so: Callable[[], object], timeout: float | None = None) -> bool:
        """Waits until ``is_so()``; returns False after `timeout` seconds in which it never was.

        Args:
          is_so: looks, and takes no lock: any thread may call it.
          timeout: in seconds; None: for ever.
        """
        if is_so():
            return True
        rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        ends = None if timeout is None else time.monotonic() + timeout
        waiter = (is_so, rings)
        self._waiting.append(waiter)  # before it looks again: no change comes in between unheard
        try:
            while not is_so():
                rings.get(timeout=None if ends is None else max(0.0, ends - time.monotonic()))
        except queue.Empty:
            return bool(is_so())
        finally:
            self._waiting.remove(waiter)
        return True
