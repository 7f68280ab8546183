"""Calls that a signal cannot cut short, and waits that it can always interrupt.

A signal (Ctrl-C) raises in the main thread, between two bytecode instructions. Other
threads keep running, and a wait that is a single C call has either finished or not.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


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


class UninterruptedCalls:
    """Runs functions on a dedicated thread, one at a time.

    A signal ends the caller's wait but not the call, which runs to completion; the next call
    waits for it. For example, orbax interrupted in the middle of a save would leave a step that
    looks complete but is not.

    Attributes:
      process: the number of the process that the thread is in; None: there is no thread.

    Args:
      prepare: called on the caller's thread before each call.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._thread: concurrent.futures.Executor | None = None
        self.process: int | None = None
        self._one_at_a_time = threading.Lock()

    def call(self, fn: Callable[[], T]) -> T:
        """Returns ``fn()``; a signal ends the wait for it, but not the call."""
        self._prepare()
        call = _Call(fn, self._one_at_a_time)
        self._submit(call)
        return call.result()

    def complete(self, fn: Callable[[], T]) -> T:
        """Returns ``fn()``; a signal raises either before it begins or after it is done."""
        self._prepare()
        call = _Call(fn, self._one_at_a_time)
        return _complete(call, lambda: self._submit(call))

    def _submit(self, call: _Call[T]) -> None:
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "distjax-uninterrupted")
            self.process = os.getpid()
        try:
            self._thread.submit(call.run)
        except BaseException as error:  # a signal while the thread was starting
            thread, self._thread, self.process = self._thread, None, None
            thread.shutdown(wait=False)
            raise find_interrupt(error) from None

    def close(self) -> None:
        """Ends the thread once pending calls are done; a later call starts a new one."""
        thread, self._thread, self.process = self._thread, None, None
        if thread is not None:
            thread.shutdown()


class _Call(Generic[T]):
    """A call that runs on another thread.

    Args:
      fn: the function to call.
      lock: held while it runs.
    """

    def __init__(self, fn: Callable[[], T], lock: threading.Lock):
        self._fn = fn
        self._lock = lock
        self._permits = [True]  # whoever takes it runs the call or cancels it
        self._outcomes: list[tuple[T, None] | tuple[None, BaseException]] = []
        self._ended = Waiters()

    def run(self) -> None:
        """Runs the call on the worker thread, unless it was cancelled."""
        with self._lock:
            if not self.cancel():
                return
            try:
                self._outcomes.append((self._fn(), None))
            except BaseException as error:  # re-raised by `result`
                self._outcomes.append((None, error))
        self._ended.ring()

    def cancel(self) -> bool:
        """Takes the only permit to run; returns False if it was already taken."""
        try:
            self._permits.pop()
        except IndexError:
            return False
        return True

    def wait(self) -> None:
        """Returns when the call has ended."""
        self._ended.wait_until(lambda: self._outcomes)

    def result(self) -> T:
        """Returns what the call returned, or raises what it raised."""
        self.wait()
        value, error = self._outcomes[0]
        if error is None:
            return value  # type: ignore[return-value]
        try:
            raise error
        finally:
            del error  # else error, traceback and this frame keep each other alive


def _complete(call: _Call[T], start: Callable[[], None]) -> T:
    """Starts a call and returns its result; a signal cancels it, or waits for its end."""
    try:
        start()
        return call.result()
    except BaseException:
        if not call.cancel():
            call.wait()
        raise


def find_interrupt(error: BaseException) -> BaseException:
    """Returns the signal's exception hidden behind `error`, or `error` itself.

    A signal that raises inside a lock of `threading` makes the lock raise another error
    while unwinding: "release unlocked lock".
    """
    inner = error
    while isinstance(inner, Exception) and inner.__context__ is not None:
        inner = inner.__context__
    return error if isinstance(inner, Exception) else inner
