"""Least bytes: which part of an update runs at the worker, so that the least of it travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distjax.servers.code import Code, trace_code
from distjax.servers.update import Update


@dataclass(frozen=True)
class Moved:
    """What of an update runs at the worker, before anything is sent.

    Attributes:
      code: (*operands) -> (*results).
      operands: names of the replica trace.
      results: names of what it computes: of values that are sent, and of answers.
    """

    code: Code
    operands: tuple[Any, ...]
    results: tuple[Any, ...]


NOTHING_MOVED = Moved(trace_code(lambda: [], ()), (), ())


def move_to_worker(update: Update) -> tuple[Moved, Update]:
    """Returns what of an update runs at the worker, and the rest."""
    return NOTHING_MOVED, update
