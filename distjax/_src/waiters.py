"""Waits for what another thread does, which a signal (Ctrl-C) ends at any time."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable


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
        """Waits until ``is_so()``; returns False if `timeout` passes without it.

        Args:
          is_so: the condition; takes no lock, since any thread may call it.
          timeout: in seconds; None: forever.
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
