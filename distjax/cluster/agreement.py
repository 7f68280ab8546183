"""Agreement: processes compare what they are about to do, and proceed only if it is equal.

Processes that do different things do not crash by themselves: collectives of equal size pair up,
and all train on wrong numbers. So the processes meet where a program is traced, a variable is
created or a batch is taken. All get the same verdict, and the same error. They exchange digests,
and texts only where digests differ.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import threading
import zlib
from collections.abc import Sequence

from distjax.cluster.facts import ComparedFact
from distjax.cluster.job import job
from distjax.cluster.meeting import difference_text, exchange
from distjax.errors import AgreementError

#: Texts are truncated to this before sending, as the service limits message sizes.
_MAX_TEXT = 2_000_000
#: How many characters of a line are shown at most.
_MAX_LINE = 200

_agreed: set[str] = set()
_one_at_a_time = threading.RLock()


def agree(
    occasion: str, facts: Sequence[ComparedFact], *, known_by: Sequence[ComparedFact] = ()
) -> None:
    """Waits until all processes of the job pass equal facts; a no-op without a job.

    Args:
      occasion: what this process is about to do, such as "the first call of step".
      facts: what must be equal, each under its own name.
      known_by: facts that decide. If they have been agreed on before, there is no meeting,
        whatever the occasion and the other facts: this process may be the only one that is here
        again.

    Raises:
      AgreementError: the processes differ. All raise the same text, and nothing has changed.
      StuckError, PeerLostError: a process did not arrive.
    """
    joined = job()
    if joined is None:
        return
    known = _digest("", _as_text(known_by)) if known_by else None
    with _one_at_a_time:
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
