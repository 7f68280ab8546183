"""Filters tracebacks of errors in user functions down to the user's lines, as JAX does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from distjax._src.user_lines import is_library_code

_config: Any = jax.config  # type checkers do not know its options


def keep_user_lines(error: BaseException) -> None:
    """Drops distjax and JAX frames below the caller from the traceback of `error`.

    A step runs inside a trace, so a dozen library frames would separate the line that runs
    it from the line that is wrong. JAX_TRACEBACK_FILTERING=off keeps them.
    """
    if _config.jax_traceback_filtering == "off" or error.__traceback__ is None:
        return
    top, *below = _entries(error.__traceback__)
    kept = [top, *(e for e in below if not is_library_code(e.tb_frame.f_code))]
    for entry, following in itertools.pairwise(kept):
        entry.tb_next = following
    kept[-1].tb_next = None


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next
