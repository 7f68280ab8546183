"""The exception that the main thread is raising, while its `finally` blocks still run.

The others of a job may end because of it before it is printed, and their end would end this
process too. Its own error says more than theirs, so it is given a moment, and then printed.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

_PERIOD = 0.02
#: Between two `finally` blocks, and on the way to the hook that prints it, no error is handled.
_QUIET_SECONDS = 0.2


class Unwinding:
    """Tells a `finally` block, or a `with` that is left, from work in an `except` block.

    Both have an exception that is being handled. In the latter the program goes on: it makes calls.
    """

    def __init__(self) -> None:
        self._seen: tuple[int, int] | None = (
            None  # the exception's id, calls when it was first seen
        )

    def look(self, num_calls: int) -> BaseException | None:
        """Returns what the main thread is raising; `num_calls` is the ledger's current count."""
        error = _handled()
        if error is None:
            self._seen = None
            return None
        if self._seen is None or self._seen[0] != id(error):
            self._seen = id(error), num_calls
        return error if num_calls - self._seen[1] <= 1 else None  # one may be in `finally`

    def wait(self, num_calls: int, seconds: float) -> BaseException | None:
        """Waits until the main thread has raised; returns what it is still raising after that."""
        quiet = time.monotonic()
        deadline = quiet + seconds
        while (now := time.monotonic()) < deadline:
            if self.look(num_calls) is not None:
                quiet = now
            elif now - quiet > _QUIET_SECONDS:
                return None
            time.sleep(_PERIOD)
        return self.look(num_calls)


def _handled() -> BaseException | None:
    """Returns the error that the main thread is handling; ends and interrupts of loops are none."""
    active = sys._current_exceptions()  # pyright: ignore[reportPrivateUsage]
    found: Any = active.get(threading.main_thread().ident or 0)
    error = found[1] if isinstance(found, tuple) else found  # a tuple before Python 3.12
    is_error = isinstance(error, (Exception, KeyboardInterrupt))
    return (
        error if is_error and not isinstance(error, (StopIteration, StopAsyncIteration)) else None
    )


#: That of this process.
unwinding = Unwinding()
