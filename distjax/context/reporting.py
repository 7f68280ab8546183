"""Reporting findings: what a trace shows to be probably wrong.

A finding is an error, a warning or a note. Notes may also apply to correct programs, so only
`dj.explain` and `dj.check` show them. Anything declared by `dj.expect` is shown but not raised.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import warnings
from collections.abc import Collection, Sequence
from contextvars import ContextVar

from distjax import user_lines
from distjax.context import frames
from distjax.context.expectation import current_reason
from distjax.context.finding import Finding
from distjax.errors import ReductionWarning

#: The rule name for state that goes in equal and comes out different.
STATE = "state that comes back different"
STATE_WHY = "a missing all_reduce makes every replica train a model of its own"
#: Before the reason of a finding where R = 1.
ALONE = "one replica hides it; with more, "
STATE_FIX = (
    "grads = dj.get_replica_context().all_reduce('mean', grads) before the update, and before "
    "computing any flag that gates it"
)
#: Flax's name for the collection of a batch norm's moving averages: state, but not parameters.
_STATISTICS = "batch_stats"
_STATISTICS_FIX = (
    "nn.BatchNorm(..., axis_name=strategy.axis_name), for the statistics of all replicas' examples"
)
#: The rule name for averaged local variances, which ignore how the replicas' means differ.
LOCAL_VARIANCES = "local variances averaged"
#: The rule name for gradients that are equal before any reduction.
EQUAL_BATCH = "the same batch on every replica"

#: The steps of a path such as s.a['b'][0].
_STEP = re.compile(r"^\w+|\.\w+|\['[^']*'\]|\[\w+\]")
#: What a path has below a node whose class gives its parts no names: the user cannot write it.
_NAMELESS = "[<flat index "
_num_reported: ContextVar[int] = ContextVar("distjax_num_reported", default=0)


def state_why(differing: Sequence[str]) -> str:
    """Returns why state at these paths needs to come back equal."""
    if _are_statistics(differing):
        return "each replica keeps the statistics of its own examples"
    return STATE_WHY


def expected_state_fix(differing: Sequence[str], equal: Collection[str]) -> str:
    """Returns the fix for state that may also differ on purpose, such as local batch statistics.

    It names the largest parts that hold nothing else: a reduction forgotten in the rest of the
    state is still found. Of an object whose parts have no names it can only name the object.

    Args:
      differing: the user's paths to the leaves that differ.
      equal: the paths to the other leaves of the arguments.
    """
    kept = {part for path in equal for part in _parts(path)}
    named = [path.partition(_NAMELESS)[0] for path in differing]
    parts = [next((p for p in _parts(path) if p not in kept), path) for path in named]
    first, *more = dict.fromkeys(parts)
    cure = _STATISTICS_FIX if _are_statistics(differing) else STATE_FIX
    fix = f"{cure}; or, where it is meant: dj.expect(reason, differs={first})"
    if not more:
        return fix
    rest = f" and {len(more) - 3} more parts" if len(more) > 3 else ""
    return f"{fix}, and the same for {', '.join(more[:3])}{rest}"


def _are_statistics(differing: Sequence[str]) -> bool:
    """Returns whether only batch statistics differ: the parameters were reduced."""
    return all(_STATISTICS in path for path in differing)


def _parts(path: str) -> list[str]:
    """Returns [s, s.a, s.a['b']] for the path s.a['b']."""
    parts = [*itertools.accumulate(_STEP.findall(path))]
    return parts if parts and parts[-1] == path else [path]


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
