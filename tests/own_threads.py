"""Tests, and parts of them, on threads of their own.

For what may leave a thread's context (of distjax, or of JAX) broken: it ends with the thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


def in_own_thread(fn: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Returns ``fn()`` of a new thread, or raises what it raised.

    Args:
      fn: what is called.
      seconds: how long a thread that hangs is awaited.
    """
    ended: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            ended.append((fn(), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert ended, f"the thread has not ended after {seconds} s"
    result, error = ended[0]
    if error is not None:
        raise error
    return result


def on_own_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Returns the test, to be run on a thread of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_own_thread(functools.partial(test, *args, **kwargs))

    return run
