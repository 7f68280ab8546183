"""Pauses: which threads keep closures from running, and may not wait for them."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Generator

from distjax.errors import ContextError, message


@dataclasses.dataclass(eq=False)
class Pause:
    """A pause of the thread that makes it.

    Attributes:
      is_restore: whether it is for a restore of the servers.
      is_entered: whether its block runs; until then it waits.
      thread: the thread.
    """

    is_restore: bool
    is_entered: bool = False
    thread: int = dataclasses.field(default_factory=threading.get_ident)


class Pauses:
    """The pauses of a board; true while there is one. It takes no lock.

    It also knows who draws an element: closures wait for it, and it may not wait for them.
    """

    def __init__(self) -> None:
        self._pauses: dict[Pause, None] = {}
        self._drawing: set[int] = set()  # threads

    def __bool__(self) -> bool:
        return bool(self._pauses)

    def begin(self, pause: Pause) -> None:
        """Records a pause."""
        self._pauses[pause] = None

    def end(self, pause: Pause) -> None:
        """Records that a pause is over, if it had begun."""
        self._pauses.pop(pause, None)

    def is_free(self, pause: Pause) -> bool:
        """Returns whether no other thread is in a block that excludes that of a pause.

        A restore changes values: what others read in their pauses must not change meanwhile, unless
        they wait there for a restore of their own, which would wait for this one forever.
        """
        pauses = tuple(self._pauses)
        waiting = {p.thread for p in pauses if p.is_restore and not p.is_entered}
        others = [p for p in pauses if p.is_entered and p.thread not in {pause.thread, *waiting}]
        return not any(p.is_restore or pause.is_restore for p in others)

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
        if threading.get_ident() not in [p.thread for p in tuple(self._pauses)]:
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
