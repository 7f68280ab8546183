"""Pipelines: items made ahead on a background thread, or on demand.

The thread peeks at the stream, moves what it made to a deque, and waits while that holds `depth`
items. The consumer pops from the left, in one C call, so that a signal loses no item.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from distjax.context.thread_settings import settings_of_this_thread
from distjax.data.block import HostElement
from distjax.data.stream import End, HostStream
from distjax.errors import ContextError, message
from distjax.uninterrupted import Waiters, find_interrupt

#: The prefix of the threads' names.
THREAD_NAME = "distjax-prefetch"

_EXIT_SECONDS = 5.0  # how long the program's exit waits for sources that hang

_thread_numbers = itertools.count()
_live: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


#: Returns an item, and what the stream has ahead once the item is taken.
Peek = Callable[[], tuple[Any, list[HostElement | End]]]


class Pipeline(Protocol):
    """Produces items one after the other, ending with an `End`.

    Attributes:
      is_stopped: whether it no longer produces; items may still wait to be drained.
    """

    is_stopped: bool

    def require_own_process(self) -> None:
        """Raises a ContextError in a process forked from the one that produces."""
        ...

    def move_next(self, places: dict[int, Any], place: int) -> None:
        """Moves the next item to ``places[place]``.

        Whenever a signal arrives, the item is in exactly one of the two places.
        """
        ...

    def stop(self) -> None:
        """Stops producing items; does not wait."""
        ...

    def drain(self) -> list[Any]:
        """Stops, waits until nothing is in progress, and returns the items not taken."""
        ...


class OnDemand:
    """Produces each item on demand, in the caller's thread.

    Args:
      stream: the stream that items are made from.
      peek: returns the next item (the last is an `End`), and what the stream has ahead
        after it.
    """

    is_stopped = False

    def __init__(self, stream: HostStream, peek: Peek):
        self._stream, self._peek = stream, peek

    def require_own_process(self) -> None:
        """Does nothing: the caller produces."""

    def move_next(self, places: dict[int, Any], place: int) -> None:
        """Produces an item: see `Pipeline`."""
        item, after = self._peek()
        places[place], self._stream.ahead = item, after  # no signal is handled between the two

    def stop(self) -> None:
        """Does nothing: nothing is in progress."""

    def drain(self) -> list[Any]:
        """Returns no items: none are produced ahead."""
        return []


class Prefetcher:
    """Produces up to `depth` items ahead on its own thread, started by the first take.

    The thread inherits the context (strategies, 64-bit mode, default device) of the
    thread that creates the Prefetcher, and holds no reference to its owner: an owner
    calls `stop` when it is dropped. Only one thread at a time may take items.

    Args:
      stream: the stream that items are made from.
      peek: as for `OnDemand`.
      depth: how many items may wait.
    """

    def __init__(self, stream: HostStream, peek: Peek, depth: int):
        self._stream, self._peek = stream, peek
        self._depth = depth
        self._items: collections.deque[Any] = collections.deque()
        self._waiters = Waiters()
        self.is_stopped = self._is_started = self._has_ended = False
        self._settings = settings_of_this_thread()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=self._work, name=f"{THREAD_NAME}-{next(_thread_numbers)}", daemon=True
        )
        _live.add(self)

    def move_next(self, places: dict[int, Any], place: int) -> None:
        """Waits for the next item and moves it; an `End` once stopped: see `Pipeline`."""
        self._start()
        self._waiters.ring()  # an earlier call may have been interrupted before it did
        self._waiters.wait_until(lambda: self._items or self.is_stopped)
        if self._items:
            first = map(collections.deque.popleft, (self._items,))  # lazy: pops as it is stored
            places.update(zip((place,), first, strict=False))
        else:
            places[place] = End()
        self._waiters.ring()

    def _start(self) -> None:
        if self._is_started:
            return
        try:
            self._is_started = True
            self._thread.start()
        except BaseException as error:  # a signal, while waiting for the thread to start
            self.stop()
            raise find_interrupt(error) from None

    def require_own_process(self) -> None:
        """Raises a ContextError if the thread is in another process: see `Pipeline`."""
        if os.getpid() == self._process:
            return
        raise ContextError(
            message(
                "an iterator over a dataset needs to be read in the process that began to read it",
                got=f"process {os.getpid()}, forked from process {self._process}",
                why="the thread that moves elements to the devices ahead of the loop is not in it, "
                "so none would ever come",
                fix="begin in the new process: iterator = iter(dataset); or without a thread: "
                "dj.InputOptions(prefetch=0)",
            )
        )

    def stop(self) -> None:
        """Asks the thread to end, which it does as soon as the source lets it."""
        self.is_stopped = True
        self._waiters.ring()

    def drain(self) -> list[Any]:
        """Ends the thread and returns the items not taken."""
        self.stop()
        self.join()
        return list(self._items)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        # Before Python 3.13, a `Thread.join` ended by a signal also ends all later ones.
        self._waiters.wait_until(lambda: self._has_ended, timeout)
        self._thread.join(None if self._has_ended else 0)

    def _work(self) -> None:
        try:
            self._produce_all()
        finally:
            self._has_ended = True
            self._waiters.ring()

    def _produce_all(self) -> None:
        with self._settings():
            while self._wait_for_room():
                try:
                    item, self._stream.ahead = self._peek()
                except BaseException as error:  # e.g. SystemExit: the loop must not wait forever
                    item = End(error)
                self._items.append(item)
                self._waiters.ring()
                if isinstance(item, End):
                    break
                del item  # or its device arrays would live until the next item is made

    def _wait_for_room(self) -> bool:
        self._waiters.wait_until(lambda: self.is_stopped or len(self._items) < self._depth)
        return not self.is_stopped


@atexit.register
def _stop_all() -> None:
    """Stops all threads: calling JAX during interpreter shutdown would crash it."""
    live = list(_live)
    for prefetcher in live:
        prefetcher.stop()
    for prefetcher in live:
        prefetcher.join(_EXIT_SECONDS)
