"""Tests, and parts of them, on threads of their own.

For what may leave a thread's context (of distjax, or of JAX) broken: it ends with the thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


def in_threads(*works: Callable[[], Any], seconds: float = 120.0) -> list[Any]:
    """Returns the results of functions that begin at once, each on a thread of its own.

    Args:
      *works: what is called; what the first of them to fail raises is raised.
      seconds: how long a thread that hangs is awaited.
    """
    start = threading.Barrier(len(works))
    results: list[list[Any]] = [[] for _ in works]
    errors: list[BaseException] = []

    def call(work: Callable[[], Any], result: list[Any]) -> None:
        start.wait(seconds)
        try:
            result.append(work())
        except BaseException as error:
            errors.append(error)

    pairs = zip(works, results, strict=True)
    threads = [threading.Thread(target=call, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), f"a thread hangs for {seconds} s"
    return [result for (result,) in results]


def in_own_thread(fn: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Returns ``fn()`` of a new thread, or raises what it raised."""
    return in_threads(fn, seconds=seconds)[0]


def on_own_thread(test: Callable[..., None]) -> Callable[..., None]:
    """Returns the test, to be run on a thread of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        in_own_thread(functools.partial(test, *args, **kwargs))

    return run
