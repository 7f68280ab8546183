"""Calls that a signal does not stop half-way, and waits that it may stop anywhere.

A signal (Ctrl-C) raises in the main thread, between two steps of its Python code. What
another thread does goes on; and a wait for it that is one call in C is either over or not.
"""

from __future__ import annotations

import concurrent.futures
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Bell:
    """Wakes threads that wait until something is so.

    A `threading.Condition` that a signal interrupts may keep its lock, or raise
    "release unlocked lock" in place of KeyboardInterrupt: it is written in Python. A
    queue in C has no such moments. Whoever changes what is waited for rings after it;
    a ring that nobody heard yet stands for all.
    """

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        """Makes who waits look again."""
        if self._rings.empty():
            self._rings.put(None)

    def wait_until(self, is_so: Callable[[], object], timeout: float | None = None) -> None:
        """Returns when ``is_so()``, or after a silence of `timeout` seconds."""
        try:
            while not is_so():
                self._rings.get(timeout=timeout)
        except queue.Empty:
            pass
        finally:
            self.ring()  # this one was heard here; others may wait for the same


class UninterruptedCalls:
    """Calls functions on a thread of its own, one after the other.

    A signal ends the wait of the main thread, while the call goes on to its end. The next
    call waits for it. In the midst of a save, orbax leaves a step that looks complete
    and is not.

    Args:
      prepare: is called before each call, on the thread of the caller.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._thread: concurrent.futures.Executor | None = None
        self._one_at_a_time = threading.Lock()

    def call(self, fn: Callable[[], T]) -> T:
        """Returns ``fn()``; a signal ends the wait for it."""
        self._prepare()
        call = _Call(fn, self._one_at_a_time)
        self._submit(call)
        return call.result()

    def complete(self, fn: Callable[[], T]) -> T:
        """Returns ``fn()``; a signal raises before it has begun, or when it is done."""
        self._prepare()
        call = _Call(fn, self._one_at_a_time)
        try:
            self._submit(call)
            return call.result()
        except BaseException:
            if not call.cancel():
                call.wait()
            raise

    def _submit(self, call: _Call[T]) -> None:
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "distjax-uninterrupted")
        try:
            self._thread.submit(call.run)
        except BaseException as error:  # a signal, while the thread starts
            thread, self._thread = self._thread, None
            thread.shutdown(wait=False)
            raise find_interrupt(error) from None

    def close(self) -> None:
        """Ends the thread when what was called is done; a later call starts another."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()


class _Call(Generic[T]):
    """A call on another thread.

    Args:
      fn: what is called.
      lock: held meanwhile.
    """

    def __init__(self, fn: Callable[[], T], lock: threading.Lock):
        self._fn = fn
        self._lock = lock
        self._permits = [True]  # who takes it runs the call, or cancels it
        self._outcomes: list[tuple[T, None] | tuple[None, BaseException]] = []
        self._ended = Bell()

    def run(self) -> None:
        """Calls, in the thread that runs calls, unless it is cancelled."""
        with self._lock:
            if not self.cancel():
                return
            try:
                self._outcomes.append((self._fn(), None))
            except BaseException as error:  # raised where the result is waited for
                self._outcomes.append((None, error))
        self._ended.ring()

    def cancel(self) -> bool:
        """Returns whether the call has not begun; then it will not."""
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
            del error  # or error, traceback and this frame would keep each other alive


def call_uninterrupted(fn: Callable[[], T]) -> T:
    """Returns ``fn()``, called on a thread that no signal reaches, in this thread's context.

    A signal is raised here when the call has ended, or before it begins.
    """
    context = contextvars.copy_context()
    call = _Call(lambda: context.run(fn), threading.Lock())
    try:
        threading.Thread(target=call.run, name="distjax-call").start()
        return call.result()
    except BaseException:
        if not call.cancel():
            call.wait()
        raise


def find_interrupt(error: BaseException) -> BaseException:
    """Returns the signal's exception that `error` hides, or `error`.

    A signal that raises in a lock of `threading` makes it raise another error on its way
    out: "release unlocked lock".
    """
    inner = error
    while isinstance(inner, Exception) and inner.__context__ is not None:
        inner = inner.__context__
    return error if isinstance(inner, Exception) else inner
