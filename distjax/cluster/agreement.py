"""Meetings: where processes of a job compare what they are about to do, and go on only if equal.

Processes that do different things do not crash of themselves: collectives of equal size pair up,
and both train on wrong numbers. So where a program is traced, a variable made or a checkpoint
written, each process says what it is about to do, through the coordination service and without a
device. Process 0 compares; the verdict is the same on all, and so is the error.

A meeting costs each process a few messages of one line. Texts are sent only where they differ.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import threading
import zlib
from collections.abc import Sequence

import jax

from distjax.cluster.facts import Fact
from distjax.cluster.job import Job, job
from distjax.errors import AgreementError, PeerLostError, StuckError, message

#: What a text is cut to before it is sent, compressed: the service bounds its messages.
_MAX_TEXT = 2_000_000
#: What is shown of a line.
_MAX_LINE = 200


class _Meetings:
    """The meetings of this process, which come in the same order on every process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.agreed: set[str] = set()


_meetings = _Meetings()


def agree(occasion: str, facts: Sequence[Fact], *, is_known_by_text: bool = False) -> None:
    """Returns when every process of the job has said the same; at once where there is no job.

    Args:
      occasion: what this process is about to do, as "the first call of step".
      facts: what has to be equal, at most one by each name.
      is_known_by_text: whether facts that were agreed on before need no meeting, so that one
        process alone may come here again.

    Raises:
      AgreementError: processes differ. The same text on all of them; nothing has changed.
      StuckError: a process did not come in time.
      PeerLostError: a process has ended.
    """
    joined = job()
    if joined is None:
        return
    digest = hashlib.sha256(
        json.dumps([occasion, *map(dataclasses.astuple, facts)]).encode()
    ).hexdigest()
    with _meetings.lock:
        if is_known_by_text and digest in _meetings.agreed:
            return
        _meet(joined, occasion, digest, facts)
        if is_known_by_text:
            _meetings.agreed.add(digest)


def _meet(joined: Job, occasion: str, digest: str, facts: Sequence[Fact]) -> None:
    _meetings.count += 1
    place = f"distjax/meeting/{_meetings.count}"
    client = joined.client
    client.key_value_set(f"{place}/came/{joined.process_id}", digest)
    _wait(joined, f"{place}/all", occasion, f"{place}/came")
    if joined.process_id == 0:
        came = client.key_value_dir_get(f"{place}/came")
        others = sorted(int(key.rpartition("/")[2]) for key, said in came if said != digest)
        client.key_value_set(f"{place}/differ", json.dumps(others))
        if _meetings.count > 1:  # all have left it: they are here
            client.key_value_delete(f"distjax/meeting/{_meetings.count - 1}")
    differ = json.loads(_get(joined, f"{place}/differ", occasion))
    if differ:
        raise AgreementError(_compare(joined, place, occasion, facts, differ))


def _wait(joined: Job, barrier: str, occasion: str, came: str) -> None:
    milliseconds = math.ceil(joined.timeouts.meeting * 1000)
    try:
        joined.client.wait_at_barrier(barrier, milliseconds)
    except jax.errors.JaxRuntimeError as error:
        raise _absence(joined, occasion, came, error) from None


def _get(joined: Job, key: str, occasion: str) -> str:
    milliseconds = math.ceil(joined.timeouts.meeting * 1000)
    try:
        return joined.client.blocking_key_value_get(key, milliseconds)
    except jax.errors.JaxRuntimeError as error:
        raise _absence(joined, occasion, None, error) from None


def _absence(
    joined: Job, occasion: str, came: str | None, error: Exception
) -> StuckError | PeerLostError:
    """Returns what to raise where others did not come, or cannot be reached."""
    everyone = range(joined.num_processes)
    try:
        here = joined.client.key_value_dir_get(came) if came is not None else []
        missing = {*everyone} - {int(key.rpartition("/")[2]) for key, _ in here}
    except jax.errors.JaxRuntimeError:
        missing = {0}  # the coordinator itself
    names = ", ".join(joined.name_process(i) for i in sorted(missing)) or "a process"
    is_late = "DEADLINE_EXCEEDED" in str(error)
    what = f"did not come within {joined.timeouts.meeting:g} s" if is_late else "has ended"
    return (StuckError if is_late else PeerLostError)(
        message(
            f"{occasion} needs all {joined.num_processes} processes",
            got=f"{names} {what}, while process {joined.process_id} waited",
            why="every process makes the same calls in the same order, and they compare them first",
            fix="look at what those processes did last; a call under `if jax.process_index() == 0` "
            "is made by one of them alone. If they are only slow: "
            "dj.initialize(..., meeting_timeout=600)",
        )
    )


# -- what differs -------------------------------------------------------------


def _compare(
    joined: Job, place: str, occasion: str, facts: Sequence[Fact], differ: Sequence[int]
) -> str:
    """Returns the text of the error, made of what process 0 and the first other one say."""
    pair = (0, differ[0])
    if joined.process_id in pair:
        said = json.dumps([occasion, *map(dataclasses.astuple, facts)])[:_MAX_TEXT]
        packed = base64.b64encode(zlib.compress(said.encode())).decode()
        joined.client.key_value_set(f"{place}/said/{joined.process_id}", packed)
    texts = []
    for process in pair:
        packed = _get(joined, f"{place}/said/{process}", occasion)
        texts.append(zlib.decompress(base64.b64decode(packed)).decode())
    name, first, second = _first_difference(*map(_parse, texts))
    is_more = f" (and processes {', '.join(map(str, differ[1:]))})" if differ[1:] else ""
    return message(
        f"processes need to do the same, and {joined.name_process(differ[0])}{is_more} differs "
        f"from process 0 in {name}",
        got=f"{second} on process {differ[0]}; {first} on process 0",
        why="each process runs a part of one program over all of them; parts of different programs "
        "exchange wrong numbers in silence",
        fix="make it equal on every process: the same file, seed and options, no branch on "
        "jax.process_index() around it. A set of strings iterates differently in each process "
        "unless PYTHONHASHSEED is set. What may differ is a PerReplica: "
        "strategy.distribute_values_from_function(fn)",
    )


def _parse(said: str) -> dict[str, str]:
    try:
        occasion, *facts = json.loads(said)
    except ValueError:  # cut
        return {"the program": said}
    return {"what they do": occasion, **dict(facts)}


def _first_difference(first: dict[str, str], second: dict[str, str]) -> tuple[str, str, str]:
    for name in {**first, **second}:
        a, b = first.get(name), second.get(name)
        if a == b:
            continue
        if a is None or b is None:
            return name, _show(a), _show(b)
        lines = zip(a.splitlines(), b.splitlines(), strict=False)
        pair = next(((x, y) for x, y in lines if x != y), (a[-_MAX_LINE:], b[-_MAX_LINE:]))
        return name, *map(_show, _around(*pair))
    return "the order of what they compare", "one order", "another"


def _around(first: str, second: str) -> tuple[str, str]:
    """Returns two lines from shortly before where they differ."""
    same = next((i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y), 0)
    start = max(0, same - _MAX_LINE // 2)
    return first[start:], second[start:]


def _show(text: str | None) -> str:
    if text is None:
        return "nothing of the kind"
    text = text.strip()
    return repr(text if len(text) <= _MAX_LINE else text[: _MAX_LINE - 3] + "...")
