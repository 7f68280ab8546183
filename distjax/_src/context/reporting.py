"""Reporting findings: what a trace shows to be probably wrong.

A finding is an error, a warning or a note. Notes may also apply to correct programs, so only
`dj.explain` and `dj.check` show them. Anything declared by `dj.expect` is shown but not raised.
"""

from __future__ import annotations

import dataclasses
import warnings
from contextvars import ContextVar

from distjax._src import hooks, user_lines
from distjax._src.context.expectation import current_reason
from distjax.errors import ReductionWarning


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about a step that is probably wrong.

    Attributes:
      level: "error", "warning" or "note".
      rule: the kind of mistake, in a few words.
      text: what was expected and found, why it matters, and the fix.
      source: the user's line, "file:line (function)".
      expected: the reason given through `dj.expect`, or None.
    """

    level: str
    rule: str
    text: str
    source: str
    expected: str | None = None


#: The rule name for state that goes in equal and comes out different.
STATE = "state that comes back different"
_num_reported: ContextVar[int] = ContextVar("distjax_num_reported", default=0)


def num_reported() -> int:
    """Returns how often this thread has reported state that comes back different, except notes."""
    return _num_reported.get()


def report(finding: Finding, kind: type[Warning] | type[Exception] = ReductionWarning) -> None:
    """Reports a finding: raises it, warns about it, or only tells those that listen.

    Args:
      finding: what was found.
      kind: the class of the warning or error; of no use for a note.
    """
    is_note = finding.level == "note"
    if finding.rule == STATE and not is_note:
        _num_reported.set(_num_reported.get() + 1)
    if finding.expected is None:
        finding = dataclasses.replace(finding, expected=current_reason())
    is_taken = any(hooks.tell(hooks.on_finding, finding))
    if finding.expected is not None or is_note or is_taken:
        return
    if issubclass(kind, Warning):
        warnings.warn(finding.text, kind, stacklevel=user_lines.user_stacklevel())
    else:
        raise kind(finding.text)
