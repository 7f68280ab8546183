"""The traceback of an error in a user's function: the user's lines, as JAX has it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import TracebackType

import jax

from distjax.jax_compat import is_library_file


def keep_user_lines(error: BaseException) -> None:
    """Takes the frames of distjax and JAX below the caller out of the traceback of `error`.

    A step is called from within a trace: a dozen frames of ours would stand between the
    line that runs it and the line that is wrong. JAX_TRACEBACK_FILTERING=off keeps them.
    """
    if jax.config.jax_traceback_filtering == "off" or error.__traceback__ is None:
        return
    top, *below = _entries(error.__traceback__)
    kept = [e for e in below if not is_library_file(e.tb_frame.f_code.co_filename)]
    for entry, following in itertools.pairwise([top, *kept, None]):
        entry.tb_next = following


def _entries(entry: TracebackType | None) -> Iterator[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next
