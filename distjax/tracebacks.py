"""The traceback of an error in a user's function: the user's lines, as JAX has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import jax

from distjax.jax_compat import is_library_file


def keep_user_lines(error: BaseException) -> None:
    """Takes the frames of distjax and JAX below the caller out of the traceback of `error`.

    A step is called from within a trace: a dozen frames of ours would stand between the
    line that runs it and the line that is wrong. JAX_TRACEBACK_FILTERING=off keeps them.
    """
    config: Any = jax.config
    if config.jax_traceback_filtering == "off":
        return
    entries = list(_entries(error.__traceback__))
    below = [e for e in entries[1:] if not is_library_file(e.tb_frame.f_code.co_filename)]
    kept = [*entries[:1], *below]
    for entry, following in itertools.zip_longest(kept, kept[1:]):
        entry.tb_next = following


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next
