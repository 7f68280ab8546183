"""Producing items on a background thread, ahead of who takes them."""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax

from distjax.context import frames
from distjax.data.stream import End

#: The names of the threads begin so.
THREAD_NAME = "distjax-prefetch"

_EXIT_SECONDS = 5.0  # how long the end of the program waits for sources that hang

_thread_numbers = itertools.count()
_live: weakref.WeakSet[Prefetcher] = weakref.WeakSet()


class Pipeline(Protocol):
    """Gives items one after the other, the last one an `End`.

    Attributes:
      is_stopped: whether no more items were asked for, which may wait to be drained.
    """

    is_stopped: bool

    def get(self) -> Any:
        """Returns the next item."""
        ...

    def stop(self) -> None:
        """Asks for no more items; does not wait."""
        ...

    def drain(self) -> list[Any]:
        """Stops, waits until nothing is under way, and returns the items not taken."""
        ...


class Direct:
    """Produces each item when it is asked for, in the caller's thread."""

    is_stopped = False

    def __init__(self, produce: Callable[[], Any]):
        self.get = produce

    def stop(self) -> None:
        """Nothing is under way."""

    def drain(self) -> list[Any]:
        """Returns no item: none is produced ahead."""
        return []


class Prefetcher:
    """Produces up to `depth` items ahead on a thread of its own.

    The thread sees the context (strategies, 64-bit mode, default device) of the
    thread that makes the Prefetcher, and holds no reference to its owner: an owner
    that is dropped calls `stop`.

    Args:
      produce: returns the next item; an `End` is the last one.
      depth: how many items may wait.
    """

    def __init__(self, produce: Callable[[], Any], depth: int):
        self._produce = produce
        self._depth = depth
        self._items: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()
        self.is_stopped = self._has_ended = False
        self._context = _context_of_this_thread()
        self._thread = threading.Thread(
            target=self._work, name=f"{THREAD_NAME}-{next(_thread_numbers)}", daemon=True
        )
        _live.add(self)
        try:
            self._thread.start()
        except BaseException:  # a signal, while it waits for the thread to run
            self.stop()
            raise

    def get(self) -> Any:
        """Returns the next item, and waits for it; an `End` again and again, or once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._items or self.is_stopped)
            if not self._items:
                return End()
            if isinstance(self._items[0], End):
                return self._items[0]
            self._changed.notify_all()
            return self._items.popleft()

    def stop(self) -> None:
        """Asks the thread to end; it does as soon as the source lets it."""
        with self._changed:
            self.is_stopped = True
            self._changed.notify_all()

    def drain(self) -> list[Any]:
        """Ends the thread and returns the items not taken."""
        self.stop()
        self.join()
        return list(self._items)

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to end."""
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        with self._changed:  # before Python 3.13 a `join` that a signal ends, ends all later ones
            self._changed.wait_for(lambda: self._has_ended, timeout)
            has_ended = self._has_ended
        self._thread.join(None if has_ended else 0)

    def _work(self) -> None:
        try:
            self._produce_all()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _produce_all(self) -> None:
        with self._context():
            while self._wait_for_room():
                try:
                    item = self._produce()
                except BaseException as error:  # SystemExit, say: the loop must not wait for ever
                    item = End(error)
                with self._changed:
                    self._items.append(item)
                    self._changed.notify_all()
                if isinstance(item, End):
                    break
                del item  # or a device array would live one item longer

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.is_stopped or len(self._items) < self._depth)
            return not self.is_stopped


def _context_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns what makes another thread see the context of the calling one."""
    stack = frames.stack()
    config: Any = jax.config  # these two are this thread's; pyright does not see them
    x64, device = config.jax_enable_x64, config.jax_default_device

    @contextlib.contextmanager
    def enter_context() -> Iterator[None]:
        with frames.with_stack(stack), jax.enable_x64(x64), jax.default_device(device):
            yield

    return enter_context


@atexit.register
def _stop_all() -> None:
    """Ends all threads: one that calls JAX while the interpreter shuts down would crash it."""
    live = list(_live)
    for prefetcher in live:
        prefetcher.stop()
    for prefetcher in live:
        prefetcher.join(_EXIT_SECONDS)
