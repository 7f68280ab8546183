"""Meetings: where the processes of a job compare what they are about to do, without devices.

Processes that do different things do not crash by themselves: collectives of equal size pair up,
and all train on wrong numbers, or they hang. So the processes meet where a program is traced, a
variable is created or a batch is taken, and proceed only if it is equal. All get the same verdict,
and the same error.

A meeting goes through the coordination service: each process publishes its text under a numbered
key, and process 0 publishes the list of all texts, for which the others wait. Errors name any
process that does not arrive. What is compared is exchanged as digests, and as texts only where
digests differ.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from distjax import errors
from distjax._src import jax_compat
from distjax._src.cluster.job import Job, as_plain, job
from distjax._src.cluster.ledger import Mark, hear, ledger, phase, waiting
from distjax._src.typing import PyTree
from distjax.errors import AgreementError, PeerLostError, StuckError, message

#: The longest wait in one call of the service: Python handles no signal (Ctrl-C) during it.
_CALL_SECONDS = 1.0
#: How often, at least, a process looks at what those do for whom it waits.
_NUM_LOOKS = 4
#: How long a process looks for another's file: network file systems take a moment.
_LOOK_SECONDS = 5.0
#: How much of another library's error text the others are told.
_MAX_FAILURE = 300

#: Meetings are numbered, and occur in the same order on every process.
_lock = threading.RLock()
_count = 0


def exchange(
    joined: Job, occasion: str, text: str, seconds: float | None = None
) -> tuple[str, ...]:
    """Holds a meeting of all processes; returns each one's text, by process id.

    Texts are short, since process 0 forwards them all. The wait is at most `seconds` (None:
    `meeting_timeout`), unless the last process is at slow work (see `phases`).

    Raises:
      AgreementError: processes are about to do different things; all of them raise it.
      StuckError: a process did not arrive in time.
      PeerLostError: a process has ended.
    """
    global _count
    seconds = joined.timeouts.meeting_timeout if seconds is None else seconds
    with _lock, waiting(f"waiting for the others ({occasion})"):
        _count += 1
        place = f"distjax/meeting/{_count}"
        ledger.add_meeting(occasion)
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
    one that has raised. `do` returns a JSON value, and has no collectives, so that a process may
    fail alone. Without a job, this process does it alone.
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


def any_process(flag: bool) -> bool:
    """Returns whether `flag` is True on any process of the job: to stop, skip or save together.

    Args:
      flag: what this process found, such as that its loss is not finite or its time is up.

    Context: outside a step; every process calls it, at the same place.
    Cost: one meeting of the processes, without devices; nothing in one process.

    Raises:
      AgreementError, StuckError, PeerLostError: as where processes meet.

    Example:
      >>> dj.any_process(False)
      False
    """
    return any(hear_all(job(), "dj.any_process", lambda: bool(flag)))


def hear_first(joined: Job | None, occasion: str, do: Callable[[], Any]) -> Any:
    """Returns process 0's ``do()`` on every process; arguments and errors as for `hear_all`.

    A file system may answer processes differently about a directory just created, or a step just
    removed, and with different answers they would not do the same next.
    """
    is_first = joined is None or joined.process_id == 0
    return hear_all(joined, occasion, lambda: do() if is_first else None)[0]


def who_sees(joined: Job | None, occasion: str, directory: str) -> list[bool] | None:
    """Returns whether each process sees a file of process 0 in a directory; None: it has left none.

    The directory is made if it is not there.
    """
    path = hear_first(joined, occasion, lambda: _leave_file(directory))
    if path is None:
        return None
    try:
        return hear_all(joined, occasion, lambda: _sees(directory, os.path.basename(path)))
    finally:
        with contextlib.suppress(OSError):
            if joined is None or joined.process_id == 0:
                os.remove(path)


def _leave_file(directory: str) -> str | None:
    with contextlib.suppress(OSError):
        os.makedirs(directory, exist_ok=True)
        file, path = tempfile.mkstemp(prefix=".distjax-", dir=directory)
        os.close(file)
        return path
    return None


def _sees(directory: str, name: str) -> bool:
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if name in os.listdir(directory):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def failure_of(error: BaseException) -> tuple[str, str]:
    """Returns the class of an error, and its text, as the other processes are told."""
    name = type(error).__name__
    is_ours = isinstance(error, getattr(errors, name, ()))
    return name, str(error) if is_ours else f"{name}: {as_plain(error, _MAX_FAILURE)}"


def require_no_failure(joined: Job, failures: Sequence[Sequence[str] | None]) -> None:
    """Raises the error of the first process that has failed, if one has, in its class if ours."""
    for process, failure in enumerate(failures):
        if failure is not None:
            name, text = failure
            if hasattr(errors, name):
                raise getattr(errors, name)(text)
            raise RuntimeError(f"{joined.name_process(process)} failed: {text}")


def come_and_hear(joined: Job, place: str, said: str, seconds: float) -> list[str]:
    """Publishes a text at a place; returns each process's text there, by process id.

    Process 0 waits for each of the others, and forwards what all have said. The wait is for one
    that is at no slow work, such as compiling, and starts again when that ends; in all, it is at
    most `phase_timeout` longer. Then it is JAX's JaxRuntimeError.
    """
    client = joined.client
    client.key_value_set(f"{place}/came/{joined.process_id}", said, allow_overwrite=True)
    if joined.process_id != 0:
        (heard,) = _await(joined, place, ["said"], seconds)
        return json.loads(heard)
    others = [f"came/{i}" for i in range(1, joined.num_processes)]
    all_said = [said, *_await(joined, place, others, seconds)]
    client.key_value_set(f"{place}/said", json.dumps(all_said))
    return all_said


def _await(joined: Job, place: str, keys: Sequence[str], seconds: float) -> list[str]:
    """Returns what stands at keys below a place, once it all does."""
    bound = time.monotonic() + seconds + joined.timeouts.phase_timeout
    remaining, former, heard = seconds, dict[int, Mark](), list[str]()
    while len(heard) < len(keys):
        began, part = time.monotonic(), min(_CALL_SECONDS, remaining, seconds / _NUM_LOOKS)
        key, milliseconds = f"{place}/{keys[len(heard)]}", max(1, math.ceil(part * 1000))
        try:
            heard.append(joined.client.blocking_key_value_get(key, milliseconds))
            remaining -= time.monotonic() - began
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error) or time.monotonic() > bound:
                raise
            came, remaining = who_came(joined, place), remaining - part
            marks = {i: mark for i, mark in hear(joined).items() if i not in came}
            # One is at work, or has been since the last look; or all have just arrived.
            is_busy = any(m.is_busy or former.get(i, m) != m for i, m in marks.items())
            if is_busy or len(came) == joined.num_processes:
                remaining = seconds
            elif remaining <= 1e-6:
                raise
            former = marks
    return heard


def who_came(joined: Job, place: str) -> dict[int, str]:
    """Returns the texts of the processes that have arrived at a place, by process id."""
    keys = joined.client.key_value_dir_get(f"{place}/came")
    return {int(key.rpartition("/")[2]): said for key, said in keys}


def require_equal(joined: Job, what: str, said: Sequence[str]) -> None:
    """Raises an `AgreementError` about `what` unless all processes said the same."""
    differ = [i for i, other in enumerate(said) if other != said[0]]
    if differ:
        pair = repr(said[0]), repr(said[differ[0]])
        raise AgreementError(difference_text(joined, differ, what, *pair))


def difference_text(joined: Job, differ: Sequence[int], what: str, first: str, second: str) -> str:
    """Returns the text of an `AgreementError`; `second` is the value of the first of `differ`."""
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
            "around what takes long, or dj.initialize(..., meeting_timeout=600); for the end of "
            "the program shutdown_timeout=600",
        )
    )


# -- agreement -------------------------------------------------------------------

#: Texts are truncated to this before sending, as the service limits message sizes.
_MAX_TEXT = 2_000_000
#: How many characters of a line are shown at most.
_MAX_LINE = 200

_agreed: set[str] = set()


def agree(
    occasion: str, facts: Sequence[ComparedFact], *, known_by: Sequence[ComparedFact] = ()
) -> None:
    """Waits until all processes of the job pass equal facts; a no-op without a job.

    If the facts of `known_by` have been agreed on before, there is no meeting, whatever the
    occasion and the other facts: this process may be the only one that is here again.

    Raises:
      AgreementError: the processes differ. All raise the same text, and nothing has changed.
      StuckError, PeerLostError: a process did not arrive.
    """
    joined = job()
    if joined is None:
        return
    known = _digest("", _as_text(known_by)) if known_by else None
    with _lock:
        if known in _agreed:
            return
        said = _as_text(facts)
        digests = exchange(joined, occasion, _digest(occasion, said))
        differ = [i for i, other in enumerate(digests) if other != digests[0]]
        if differ:
            texts = exchange(
                joined, occasion, _pack(said) if joined.process_id in (0, differ[0]) else ""
            )
            pair = _parse(_unpack(texts[0]), _unpack(texts[differ[0]]))
            raise AgreementError(difference_text(joined, differ, *_first_difference(*pair)))
        if known is not None:
            _agreed.add(known)


def _as_text(facts: Sequence[ComparedFact]) -> str:
    return json.dumps([*map(dataclasses.astuple, facts)])


def _digest(occasion: str, said: str) -> str:
    return hashlib.sha256((occasion + said).encode()).hexdigest()


def _pack(said: str) -> str:
    return base64.b64encode(zlib.compress(said[:_MAX_TEXT].encode())).decode()


def _unpack(packed: str) -> str:
    return zlib.decompress(base64.b64decode(packed)).decode()


def _parse(first: str, second: str) -> tuple[dict[str, str], dict[str, str]]:
    try:
        return dict(json.loads(first)), dict(json.loads(second))
    except ValueError:  # one is truncated: they are compared as one fact
        return {"what they do": first}, {"what they do": second}


def _first_difference(first: dict[str, str], second: dict[str, str]) -> tuple[str, str, str]:
    for name in {**first, **second}:
        a, b = first.get(name), second.get(name)
        if a == b:
            continue
        if a is None or b is None:
            return name, _show(a), _show(b)
        lines = zip(a.splitlines(), b.splitlines(), strict=False)
        pair = next(((x, y) for x, y in lines if x != y), (a[-_MAX_LINE:], b[-_MAX_LINE:]))
        ours, theirs = _around_the_difference(*pair)
        return name, _show(ours), _show(theirs)
    return "the order in which they do it", "one order", "another"


def _around_the_difference(first: str, second: str) -> tuple[str, str]:
    length = min(len(first), len(second))
    same = next((i for i in range(length) if first[i] != second[i]), length)
    start = max(0, same - _MAX_LINE // 2)
    return first[start:], second[start:]


def _show(text: str | None) -> str:
    if text is None:
        return "nothing of the kind"
    text = text.strip()
    return repr(text if len(text) <= _MAX_LINE else text[: _MAX_LINE - 3] + "...")


# -- what is compared, as text ---------------------------------------------------

#: A callback's index within its process says nothing about the program.
_NUMBERS = re.compile(r"\{index = \d+ : ui64\}")
#: The address in a default repr, which is specific to this process.
_ADDRESSES = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclasses.dataclass(frozen=True)
class ComparedFact:
    """One fact that processes compare.

    Attributes:
      name: in the user's words, such as "argument args[0] of step".
      text: its value on this process, without addresses or paths; one line or many.
    """

    name: str
    text: str


def describe_program(lowered: jax.stages.Lowered) -> str:
    """Returns a lowered program's text, including shardings, donation and constants."""
    return _NUMBERS.sub("{}", lowered.as_text())


def describe_structure(treedef: jax.tree_util.PyTreeDef) -> str:
    """Returns a treedef's text; objects and functions in it are identified by name."""
    return _ADDRESSES.sub("", str(treedef))


def describe_on_host(value: PyTree) -> str:
    """Returns shape, dtype and checksum of a value that must be equal everywhere.

    One line. For a value that spans processes, shape and dtype only: each process holds a part.
    """
    if not hasattr(value, "dtype"):
        is_number = isinstance(value, (int, float, complex, str))
        return repr(value) if is_number else type(value).__name__
    shown = f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return shown
    is_key = jax_compat.is_key_dtype(value.dtype)
    host = np.ascontiguousarray(jax.random.key_data(value) if is_key else value)
    first = host.reshape(-1)[:1].tolist()
    return f"{shown} of checksum {zlib.crc32(host.tobytes()):08x}, first {first}"
