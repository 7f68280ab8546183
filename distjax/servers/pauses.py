"""Pauses: which threads keep a board paused."""

from __future__ import annotations

import threading

from distjax.errors import ContextError, message


class Pauses:
    """The pauses of a board; true while there is one. It takes no lock."""

    def __init__(self) -> None:
        self._threads: dict[object, int] = {}  # by pause

    def __bool__(self) -> bool:
        return bool(self._threads)

    def begin(self, pause: object) -> None:
        """Records a pause of the calling thread."""
        self._threads[pause] = threading.get_ident()

    def end(self, pause: object) -> None:
        """Records that a pause is over, if it had begun."""
        self._threads.pop(pause, None)

    def require_going(self, method: str) -> None:
        """Raises a ContextError if the calling thread keeps the board paused.

        Args:
          method: the caller, which would wait for closures forever.
        """
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
