"""Host callbacks that raise: what JAX logs of `pure_callback`, `io_callback`, `debug.callback`.

A program whose callback raises fails. With several devices in a process it may never end, so that
nobody reads its error: what follows the callback on that device does not run, and the process's
other devices, and all other processes, wait for it in a collective. JAX logs the error at once,
by loggers named after its modules, and that is the only place where it can be learned of.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import NamedTuple

import jax
from jax.experimental import io_callback

_CALLBACKS = (jax.pure_callback, io_callback, jax.debug.callback)


class FailedCallback(NamedTuple):
    """An exception in a callback.

    Attributes:
      error: the exception.
      at: when it was logged, by `time.monotonic`.
    """

    error: BaseException
    at: float


_failed: list[FailedCallback] = []


def watch_callbacks() -> None:
    """From now on, records the latest exception in a callback."""
    for name in dict.fromkeys(callback.__module__ for callback in _CALLBACKS):
        # A filter, not a handler: with a handler, Python would no longer print what JAX logs.
        logging.getLogger(name).addFilter(_record)


def failed_callback() -> FailedCallback | None:
    """Returns the first exception in a callback since `forget_failed`."""
    return _failed[0] if _failed else None


def forget_failed() -> None:
    """Forgets it: the program has ended, and its error is raised where its results are read."""
    _failed.clear()


def _record(record: logging.LogRecord) -> bool:
    error = sys.exc_info()[1]
    if error is not None and record.exc_info and not _failed:
        _failed.append(FailedCallback(error, time.monotonic()))
    return True
