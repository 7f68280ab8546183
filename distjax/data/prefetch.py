"""Producing items on a background thread, ahead of who takes them."""

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
from distjax.uninterrupted import Bell, find_interrupt

#: The names of the threads begin so.
THREAD_NAME = "distjax-prefetch"

_EXIT_SECONDS = 5.0  # how long the end of the program waits for sources that hang

_thread_numbers = itertools.count()
_live: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


#: Returns an item, and what the stream has ahead once it is taken.
Peek = Callable[[], tuple[Any, list[HostElement | End]]]


class Pipeline(Protocol):
    """Gives items one after the other, the last one an `End`.

    Attributes:
      is_stopped: whether no more items were asked for, which may wait to be drained.
    """

    is_stopped: bool

    def require_own_process(self) -> None:
        """Raises a ContextError in a process forked from the one that produces."""
        ...

    def move_next(self, places: dict[int, Any], place: int) -> None:
        """Moves the next item to ``places[place]``.

        A signal finds it here or there.
        """
        ...

    def stop(self) -> None:
        """Asks for no more items; does not wait."""
        ...

    def drain(self) -> list[Any]:
        """Stops, waits until nothing is under way, and returns the items not taken."""
        ...


class Direct:
    """Produces each item when it is asked for, in the caller's thread.

    Args:
      stream: what items are made of.
      peek: returns the next item (an `End` is the last one), and what the stream has
        after it.
    """

    is_stopped = False

    def __init__(self, stream: HostStream, peek: Peek):
        self._stream, self._peek = stream, peek

    def require_own_process(self) -> None:
        """Nothing: the caller produces."""

    def move_next(self, places: dict[int, Any], place: int) -> None:
        """Produces an item: see `Pipeline`."""
        item, after = self._peek()
        places[place], self._stream.ahead = item, after  # no signal is handled between the two

    def stop(self) -> None:
        """Nothing is under way."""

    def drain(self) -> list[Any]:
        """Returns no item: none is produced ahead."""
        return []


class Prefetcher:
    """Produces up to `depth` items ahead on a thread of its own, from the first one taken on.

    The thread sees the context (strategies, 64-bit mode, default device) of the
    thread that makes the Prefetcher, and holds no reference to its owner: an owner
    that is dropped calls `stop`. One thread at a time takes items.

    Args:
      stream: what items are made of.
      peek: as for `Direct`.
      depth: how many items may wait.
    """

    def __init__(self, stream: HostStream, peek: Peek, depth: int):
        self._stream, self._peek = stream, peek
        self._depth = depth
        self._items: collections.deque[Any] = collections.deque()
        self._filled, self._emptied, self._ended = Bell(), Bell(), Bell()
        self.is_stopped = self._is_started = self._has_ended = False
        self._settings = settings_of_this_thread()
        self._process = os.getpid()
        self._thread = threading.Thread(
            target=self._work, name=f"{THREAD_NAME}-{next(_thread_numbers)}", daemon=True
        )
        _live.add(self)

    def move_next(self, places: dict[int, Any], place: int) -> None:
        """Moves the next item, and waits for it; an `End` once stopped: see `Pipeline`."""
        self._start()
        self._emptied.ring()  # a call before this one may have been interrupted before it did
        self._filled.wait_until(lambda: self._items or self.is_stopped)
        if self._items:
            first = map(collections.deque.popleft, (self._items,))  # called where it is stored
            places.update(zip((place,), first, strict=False))
        else:
            places[place] = End()
        self._emptied.ring()

    def _start(self) -> None:
        if self._is_started:
            return
        try:
            self._is_started = True
            self._thread.start()
        except BaseException as error:  # a signal, while it waits for the thread to run
            self.stop()
            raise find_interrupt(error) from None

    def require_own_process(self) -> None:
        """Raises a ContextError where the thread is in another process: see `Pipeline`."""
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
        """Asks the thread to end; it does as soon as the source lets it."""
        self.is_stopped = True
        self._filled.ring()
        self._emptied.ring()

    def drain(self) -> list[Any]:
        """Ends the thread and returns the items not taken."""
        self.stop()
        self.join()
        return list(self._items)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        # Before Python 3.13 a `Thread.join` that a signal ends, ends all later ones.
        self._ended.wait_until(lambda: self._has_ended, timeout)
        self._thread.join(None if self._has_ended else 0)

    def _work(self) -> None:
        try:
            self._produce_all()
        finally:
            self._has_ended = True
            self._ended.ring()

    def _produce_all(self) -> None:
        with self._settings():
            while self._wait_for_room():
                try:
                    item, self._stream.ahead = self._peek()
                except BaseException as error:  # SystemExit, say: the loop must not wait for ever
                    item = End(error)
                self._items.append(item)
                self._filled.ring()
                if isinstance(item, End):
                    break
                del item  # or a device array would live one item longer

    def _wait_for_room(self) -> bool:
        self._emptied.wait_until(lambda: self.is_stopped or len(self._items) < self._depth)
        return not self.is_stopped


@atexit.register
def _stop_all() -> None:
    """Ends all threads: one that calls JAX while the interpreter shuts down would crash it."""
    live = list(_live)
    for prefetcher in live:
        prefetcher.stop()
    for prefetcher in live:
        prefetcher.join(_EXIT_SECONDS)
