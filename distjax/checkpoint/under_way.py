"""Saves under way: kept alive, and awaited at the end of the program that began them."""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol


class Saver(Protocol):
    """Something that writes in the background."""

    def wait(self) -> None:
        """Blocks until its save is complete; raises if that fails."""
        ...


#: Kept here even if nothing else references them.
saves_under_way: set[Saver] = set()
# The threads that write are not in a forked process, which would wait for them forever.
os.register_at_fork(after_in_child=saves_under_way.clear)


def wait_for_all() -> None:
    """Waits for every save; raises the first error of those that fail."""
    errors: list[Exception] = []
    for saver in list(saves_under_way):
        try:
            saver.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


# A program may end with a save. `atexit` functions run after Python has shut down the thread
# pools, without which orbax cannot complete a step.
_register: Any = getattr(threading, "_register_atexit", None)
if _register is not None:
    _register(wait_for_all)
