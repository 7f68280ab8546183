"""Marks: what a process reports between meetings, and the first difference between two of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from distjax.cluster.job import Job
from distjax.cluster.ledger import Call, Ledger
from distjax.cluster.lines import as_line, as_plain, parse_line
from distjax.cluster.phases import Phase, num_phases
from distjax.errors import describe_error

_PLACE = "distjax/watch"
#: How many of its latest calls a process reports.
_NUM_TOLD = 8
_MAX_TEXT = 80

THE_END = "the end of the program"


@dataclasses.dataclass(frozen=True)
class Mark:
    """Where a process is.

    Attributes:
      count: how many calls it has made.
      calls: the latest of them, in order.
      at: what its threads are doing.
      is_busy: whether it is doing slow work of its own.
      is_at_end: whether it has reached the end of the program, so there are no more calls.
      num_phases: how many phases it has begun, so that short ones show as well.
      beat: grows for as long as its Python runs; that is no difference between two marks.
    """

    count: int
    calls: tuple[Call, ...]
    at: str = ""
    is_busy: bool = False
    is_at_end: bool = False
    num_phases: int = 0
    beat: int = dataclasses.field(default=0, compare=False)

    def describe(self) -> str:
        """Returns "51 calls, compiling step"."""
        return f"{self.count} calls" + (f", {self.at}" if self.at else "")


def mark_of(
    ledger: Ledger,
    phases: Sequence[Phase],
    blocked: Call | None,
    at_end: bool,
    raising: BaseException | None = None,
    beat: int = 0,
) -> Mark:
    """Returns the mark of this process.

    Args:
      ledger: its calls.
      phases: what its threads are doing.
      blocked: a launch that does not return, to be added as its last call.
      at_end: whether the program has reached its end.
      raising: an exception whose `finally` blocks run.
      beat: another number than last time, now and then.
    """
    count = ledger.count
    found = map(ledger.find, range(max(1, count - _NUM_TOLD + 1), count + 1))
    calls = [call for call in found if call is not None]
    if blocked is not None and blocked.number == count + 1:
        calls, count = [*calls, blocked], count + 1
    doing = [p.what for p in phases]
    if raising is not None:
        doing.append(f"raising {_describe(raising)}")
    at = THE_END if at_end else ", ".join(doing)
    is_busy = any(p.is_work for p in phases)
    at = as_plain(at, _MAX_TEXT)
    return Mark(count, tuple(calls), at, is_busy, at_end, num_phases(), beat)


def _describe(error: BaseException) -> str:
    try:
        return describe_error(error)
    except Exception:  # of a user's class whose text raises
        return type(error).__name__


def as_text(mark: Mark) -> str:
    """Returns a mark as a line."""
    calls = [call._replace(text=as_plain(call.text, _MAX_TEXT)) for call in mark.calls]
    return as_line({**vars(mark), "calls": calls})


def parse_mark(line: str) -> Mark | None:
    """Returns the mark in a line, or None if it is malformed."""
    try:
        told = parse_line(line)
        calls = tuple(
            Call(int(n), int(c), str(t), int(p), bool(m)) for n, c, t, p, m in told.pop("calls")
        )
        return Mark(calls=calls, **told)
    except (KeyError, TypeError, ValueError):
        return None


def tell(joined: Job, text: str) -> None:
    """Publishes the mark of this process."""
    place = f"{_PLACE}/{joined.process_id}/mark"
    joined.client.key_value_set(place, text, allow_overwrite=True)


def hear(joined: Job, process: int | None = None) -> dict[int, Mark]:
    """Returns the marks of the other processes, or of one of them, by process."""
    place = _PLACE if process is None else f"{_PLACE}/{process}"
    told = {int(k.split("/")[-2]): v for k, v in joined.client.key_value_dir_get(place)}
    marks = {process: parse_mark(line) for process, line in told.items()}
    return {i: m for i, m in marks.items() if m is not None and i != joined.process_id}


def find_difference(own: Mark, ledger: Ledger, other: Mark) -> tuple[str, str] | None:
    """Returns the first call in which two processes differ, as far as is known.

    Args:
      own: the mark of this process.
      ledger: the calls of this process.
      other: the mark of the other process.

    Returns:
      What the call is here and there; None if one is merely behind the other.
    """
    mine = {call.number: call for call in own.calls}
    for i, theirs in enumerate(other.calls):
        ours = mine.get(theirs.number) or ledger.find(theirs.number)
        if ours is not None and ours.checksum != theirs.checksum:
            is_first = i > 0 or theirs.number == 1
            where = f"call {theirs.number}" + ("" if is_first else ", or one before")
            return f"{where}: {_tell_apart(ours, theirs)}", f"{where}: {_tell_apart(theirs, ours)}"
    if other.is_at_end and own.count > other.count:
        more = mine.get(other.count + 1) or ledger.find(other.count + 1)
        if more is not None and not more.is_meeting:  # meetings have their own timeout
            return f"call {more.number}: {more.text}", f"{THE_END} after {other.count} calls"
    return None


def _tell_apart(call: Call, other: Call) -> str:
    """Returns a call's text, with its program's checksum if the texts are equal."""
    if call.text != other.text or call.program == other.program:
        return call.text
    return f"{call.text}, program {call.program:08x}"
