"""Findings: what a trace shows to be probably wrong.

A finding is an error, a warning or a note: what a right program may carry too is a note, which
only `dj.explain` and `dj.check` show. What the user declares by `dj.expect` is only shown.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from contextvars import ContextVar

from distjax import jax_compat
from distjax.context import frames
from distjax.context.expectation import current_reason
from distjax.context.finding import Finding

#: The rule of state that goes in equal and comes out different.
STATE = "state that comes back different"

_num_reported: ContextVar[int] = ContextVar("distjax_num_reported", default=0)


def num_reported() -> int:
    """Returns how often this thread was told of state that comes back different, notes apart."""
    return _num_reported.get()


def report(finding: Finding, kind: type[Warning] | type[Exception] | None = None) -> None:
    """Tells of a finding: raises or warns of it, or only tells the observer.

    Args:
      finding: what was found.
      kind: the class of its error or warning; None for a note.
    """
    if finding.rule == STATE and finding.level != "note":
        _num_reported.set(_num_reported.get() + 1)
    if finding.expected is None:
        finding = dataclasses.replace(finding, expected=current_reason())
    observer = frames.observer()
    if observer is not None:
        observer.on_finding(finding)
    if finding.expected is not None or kind is None:
        return
    if observer is not None and observer.collects_findings:
        return
    if issubclass(kind, Warning):
        warnings.warn(finding.text, kind, stacklevel=jax_compat.user_stacklevel())
    else:
        raise kind(finding.text)


def calling_line() -> str:
    """Returns "file:line (function)" of the user's line that is being run."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and jax_compat.is_library_file(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_qualname})"
