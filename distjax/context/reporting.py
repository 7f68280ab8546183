"""Reporting findings: what a trace shows to be probably wrong.

A finding is an error, a warning or a note. Notes may also apply to correct programs, so only
`dj.explain` and `dj.check` show them. Anything declared by `dj.expect` is shown but not raised.
"""

from __future__ import annotations

import dataclasses
import warnings
from contextvars import ContextVar

from distjax import user_lines
from distjax.context import frames
from distjax.context.expectation import current_reason
from distjax.context.observer import Finding as Finding
from distjax.errors import ReductionWarning

#: The rule name for state that goes in equal and comes out different.
STATE = "state that comes back different"
_num_reported: ContextVar[int] = ContextVar("distjax_num_reported", default=0)


def num_reported() -> int:
    """Returns how often this thread has reported state that comes back different, except notes."""
    return _num_reported.get()


def report(finding: Finding, kind: type[Warning] | type[Exception] = ReductionWarning) -> None:
    """Reports a finding: raises it, warns about it, or only passes it to the observer.

    Args:
      finding: what was found.
      kind: the class of the warning or error; of no use for a note.
    """
    is_note = finding.level == "note"
    if finding.rule == STATE and not is_note:
        _num_reported.set(_num_reported.get() + 1)
    if finding.expected is None:
        finding = dataclasses.replace(finding, expected=current_reason())
    observer = frames.observer()
    if observer is not None:
        observer.on_finding(finding)
    if finding.expected is not None or is_note:
        return
    if observer is not None and observer.collects_findings:
        return
    if issubclass(kind, Warning):
        warnings.warn(finding.text, kind, stacklevel=user_lines.user_stacklevel())
    else:
        raise kind(finding.text)
