"""Pauses: which threads keep closures from running, and may not wait for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from distjax.errors import ContextError, message


class Pauses:
    """The pauses of a board; true while there is one. It takes no lock.

    It also knows who draws an element: closures wait for it, and it may not wait for them.
    """

    def __init__(self) -> None:
        self._threads: dict[object, int] = {}  # by pause
        self._drawing: set[int] = set()  # threads

    def __bool__(self) -> bool:
        return bool(self._threads)

    def begin(self, pause: object) -> None:
        """Records a pause of the calling thread."""
        self._threads[pause] = threading.get_ident()

    def end(self, pause: object) -> None:
        """Records that a pause is over, if it had begun."""
        self._threads.pop(pause, None)

    @contextlib.contextmanager
    def drawing(self) -> Generator[None]:
        """A context in which the calling thread draws elements for a closure."""
        thread = threading.get_ident()
        try:
            self._drawing.add(thread)
            yield
        finally:
            self._drawing.discard(thread)

    def require_going(self, method: str) -> None:
        """Raises a ContextError if the calling thread keeps closures from running.

        Args:
          method: the caller, which would wait for closures forever.
        """
        self.require_not_drawing(method)
        if threading.get_ident() not in tuple(self._threads.values()):
            return
        raise ContextError(
            message(
                f"{method} needs closures to run",
                got="a call in `with coordinator.paused():`, or in a function of `extended.update`",
                why="it waits for a closure, and none runs until that ends",
                fix="call it afterwards; until then read variables: v.value",
            )
        )

    def require_not_drawing(self, method: str) -> None:
        """Raises a ContextError if the calling thread draws an element for a closure.

        Args:
          method: the caller, which would wait for closures, or for the same data.
        """
        if threading.get_ident() not in self._drawing:
            return
        raise ContextError(
            message(
                f"{method} needs to be called outside of per-worker data",
                got="a call in the function or dataset of create_per_worker_dataset",
                why="a worker makes an element there for its closure, and both would wait for each "
                "other forever",
                fix="read variables there: v.value; or make the elements in your own loop: "
                "coordinator.schedule(step, args=(element,))",
            )
        )
