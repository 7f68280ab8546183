"""Meetings: where the processes of a job exchange a line of text, without devices.

Collectives cannot do this: between processes that do different things they hang, or pair up
wrongly. A meeting goes through the coordination service instead: each process publishes its text
under a numbered key, and process 0 publishes the list of all texts, for which the others wait.
Errors name any process that does not arrive.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax import errors
from distjax.cluster.job import Job
from distjax.cluster.ledger import ledger
from distjax.cluster.lines import as_plain
from distjax.cluster.marks import Mark, hear
from distjax.cluster.phases import phase, waiting
from distjax.errors import AgreementError, PeerLostError, StuckError, message

#: The longest wait in one call of the service: Python handles no signal (Ctrl-C) during it.
_CALL_SECONDS = 1.0
#: How often, while it waits, a process looks at what those do who are missing.
_NUM_LOOKS = 4
#: How much of another library's error text the others are told.
_MAX_FAILURE = 300

#: Meetings are numbered, and occur in the same order on every process.
_lock = threading.RLock()
_count = 0


def exchange(
    joined: Job, occasion: str, text: str, seconds: float | None = None
) -> tuple[str, ...]:
    """Holds a meeting of all processes; returns each one's text, by process id.

    Args:
      joined: the job.
      occasion: what this process is about to do, such as "the first call of step"; for errors.
      text: this process's text; short, since process 0 forwards them all.
      seconds: how long to wait for the last process, unless it is at slow work (see `phases`);
        None: `meeting_timeout`.

    Cost: a few messages per process, and the wait for the last one.

    Raises:
      AgreementError: processes are about to do different things; all of them raise it.
      StuckError: a process did not arrive in time.
      PeerLostError: a process has ended.
    """
    global _count
    seconds = joined.timeouts.meeting if seconds is None else seconds
    with _lock, waiting(f"waiting for the others ({occasion})"):
        _count += 1
        ledger.add_meeting(occasion)
        place = f"distjax/meeting/{_count}"
        said = json.dumps([ledger.describe(), occasion, text])
        try:
            all_said = come_and_hear(joined, place, said, seconds)
            if joined.process_id == 0 and _count > 1:  # all are here, so all have left the last one
                joined.client.key_value_delete(f"distjax/meeting/{_count - 1}")
        except jax.errors.JaxRuntimeError as error:
            raise _absence(joined, occasion, place, seconds, error) from None
    launches, occasions, texts = zip(*map(json.loads, all_said), strict=True)
    require_equal(joined, "what they have launched", launches)
    require_equal(joined, "what they do", occasions)
    return texts


def hear_all(joined: Job | None, occasion: str, do: Callable[[], Any]) -> list[Any]:
    """Returns what ``do()`` returns on each process, by process id, once all have done it.

    One process's failure is an error on all: none goes on to a program in which it would wait for
    one that has raised.

    Args:
      joined: the job whose processes do it; None: this process alone.
      occasion: what they do, for errors.
      do: returns a JSON value; has no collectives, so that a process may fail alone.

    Raises:
      Exception: of `do` here; of another process, see `require_no_failure`.
      ClusterError: a process does not arrive, or does something else.
    """
    if joined is None:
        return [do()]
    value, own = None, None
    try:
        with phase(occasion):  # it looks at files, say: the others wait for as long as that takes
            value = do()
    except Exception as error:
        own = error
    said = json.dumps([value, None if own is None else failure_of(own)])
    everyone = exchange(joined, occasion, said, joined.timeouts.step_deadline)
    if own is not None:
        raise own
    values, failures = zip(*map(json.loads, everyone), strict=True)
    require_no_failure(joined, failures)
    return list(values)


def hear_first(joined: Job | None, occasion: str, do: Callable[[], Any]) -> Any:
    """Returns process 0's ``do()`` on every process; arguments and errors as for `hear_all`.

    A file system may answer processes differently about a directory just created, or a step just
    removed, and with different answers they would not do the same next.
    """
    is_first = joined is None or joined.process_id == 0
    return hear_all(joined, occasion, lambda: do() if is_first else None)[0]


def failure_of(error: BaseException) -> tuple[str, str]:
    """Returns the class of an error, and its text, as the other processes are told."""
    name = type(error).__name__
    is_ours = isinstance(error, getattr(errors, name, ()))
    return name, str(error) if is_ours else f"{name}: {as_plain(error, _MAX_FAILURE)}"


def require_no_failure(joined: Job, failures: Sequence[Sequence[str] | None]) -> None:
    """Raises the error of the first process that has failed, if one has.

    Raises:
      Exception: of its class, if that is one of distjax.
      RuntimeError: with its text, if not.
    """
    for process, failure in enumerate(failures):
        if failure is not None:
            name, text = failure
            if hasattr(errors, name):
                raise getattr(errors, name)(text)
            raise RuntimeError(f"{joined.name_process(process)} failed: {text}")


def come_and_hear(joined: Job, place: str, said: str, seconds: float) -> list[str]:
    """Publishes a text at a place; returns each process's text there, by process id.

    The wait is for one that is at no slow work, such as compiling, and starts again when that ends;
    in all, it is at most `phase_timeout` longer.

    Raises:
      jax.errors.JaxRuntimeError: a process did not arrive in time, or cannot be reached.
    """
    joined.client.key_value_set(f"{place}/came/{joined.process_id}", said, allow_overwrite=True)
    return json.loads(_hear_all(joined, place, seconds))


def _hear_all(joined: Job, place: str, seconds: float) -> str:
    """Returns all texts, as forwarded by process 0 once the last one has arrived."""
    bound = time.monotonic() + seconds + joined.timeouts.phase
    remaining, marks = seconds, _Marks(joined, place)
    part = min(_CALL_SECONDS, seconds / _NUM_LOOKS)  # the first look shows what changes later
    while True:
        began, key = time.monotonic(), f"{place}/said"
        if joined.process_id == 0:
            came = who_came(joined, place)
            missing = [i for i in range(joined.num_processes) if i not in came]
            if not missing:
                said = json.dumps([came[i] for i in range(joined.num_processes)])
                joined.client.key_value_set(key, said)
                return said
            key = f"{place}/came/{missing[0]}"
        try:
            heard = _wait_for(joined, key, part)
            if joined.process_id != 0:
                return heard
            part = max(part - (time.monotonic() - began), 0.001)
            remaining -= time.monotonic() - began
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > bound:
                raise
            remaining -= part
            if marks.show_work():
                remaining = seconds
            elif remaining <= 1e-6:
                raise
            part = min(remaining, seconds / _NUM_LOOKS)


class _Marks:
    """The marks of those who are missing at a place, as far as they have been looked at."""

    def __init__(self, joined: Job, place: str):
        self._job, self._place = joined, place
        self._seen: dict[int, Mark] = {}

    def show_work(self) -> bool:
        """Returns whether one that is missing is at work, or has been since the last look.

        Also if all have just arrived.
        """
        came, former = who_came(self._job, self._place), self._seen
        self._seen = {i: mark for i, mark in hear(self._job).items() if i not in came}
        is_busy = any(m.is_busy or former.get(i, m) != m for i, m in self._seen.items())
        return is_busy or len(came) == self._job.num_processes


def _wait_for(joined: Job, key: str, seconds: float) -> str:
    """Returns the value of a key, once it is there."""
    while True:
        part = min(seconds, _CALL_SECONDS)
        seconds -= part
        try:
            return joined.client.blocking_key_value_get(key, max(1, math.ceil(part * 1000)))
        except jax.errors.JaxRuntimeError as error:
            if seconds <= 0 or "DEADLINE_EXCEEDED" not in str(error):
                raise


def who_came(joined: Job, place: str) -> dict[int, str]:
    """Returns the texts of the processes that have arrived at a place, by process id."""
    keys = joined.client.key_value_dir_get(f"{place}/came")
    return {int(key.rpartition("/")[2]): said for key, said in keys}


def require_equal(joined: Job, what: str, said: Sequence[str]) -> None:
    """Raises an `AgreementError` unless all processes said the same.

    Args:
      joined: the job.
      what: what they may differ in, in the user's words.
      said: each process's text; this list is the same on all of them.
    """
    differ = [i for i, other in enumerate(said) if other != said[0]]
    if differ:
        pair = repr(said[0]), repr(said[differ[0]])
        raise AgreementError(difference_text(joined, differ, what, *pair))


def difference_text(joined: Job, differ: Sequence[int], what: str, first: str, second: str) -> str:
    """Returns the text of an `AgreementError`, the same on every process.

    Args:
      joined: the job.
      differ: the processes that differ from process 0.
      what: what they differ in, in the user's words.
      first: its value on process 0.
      second: its value on the first of `differ`.
    """
    names = ", ".join(map(joined.name_process, differ))
    verb = "differs" if len(differ) == 1 else "differ"
    return message(
        f"processes need to do the same, and {names} {verb} from process 0 in {what}",
        got=f"{second} on process {differ[0]}; {first} on process 0",
        why="each process runs a part of one program over all of them; parts of different programs "
        "silently exchange wrong numbers",
        fix="make it equal on every process: the same file, seed and options, no branch on "
        "jax.process_index() around it. A set of strings iterates differently in each process "
        "unless PYTHONHASHSEED is set. What may differ is a PerReplica: "
        "strategy.distribute_values_from_function(fn)",
    )


def _absence(
    joined: Job, occasion: str, place: str, seconds: float, error: Exception
) -> StuckError | PeerLostError:
    """Returns the error for processes that did not arrive or cannot be reached."""
    try:
        came, marks = who_came(joined, place), hear(joined)
        missing = [i for i in range(joined.num_processes) if i not in came]
    except jax.errors.JaxRuntimeError:
        missing, marks = [0], {}  # the coordinator itself is gone
    at = {i: f" ({mark.describe()})" for i, mark in marks.items()}
    names = ", ".join(joined.name_process(i) + at.get(i, "") for i in missing) or "a process"
    is_late = "DEADLINE_EXCEEDED" in str(error)
    what = f"did not come within {seconds:g} s" if is_late else "has ended"
    return (StuckError if is_late else PeerLostError)(
        message(
            f"{occasion} needs all {joined.num_processes} processes",
            got=f"{names} {what}, while {joined.name_process(joined.process_id)} waited",
            why="every process makes the same calls in the same order, and they compare them first",
            fix="look at what those processes did last; a call under `if jax.process_index() == 0` "
            "is made by one of them alone. If they are only slow: with dj.phase('a picture'): "
            "around what takes long, or dj.initialize(..., meeting_timeout=600)",
        )
    )
