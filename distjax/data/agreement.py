"""What the processes of a job compare at each element of a dataset, as the loop takes it.

They compare where the loop is, not on the thread that reads ahead: there each process is as far
as it happens to be. A forgotten shuffle seed, files of other lengths or an error of one process
is known before the element is used.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from distjax.cluster.job import Job
from distjax.cluster.meeting import exchange
from distjax.data.elements import HostTree
from distjax.data.options import DROP, PAD
from distjax.errors import AgreementError, BatchError, PeerLostError, message

ELEMENT, ENDED, FAILED = "element", "ended", "failed"

#: What a process says at its end that never had an element.
EMPTY = "without any element"

_OCCASION = "the next element of a dataset"


class Said(NamedTuple):
    """What a process has come to.

    Attributes:
      kind: an element, the end of its data, or an error of its source.
      text: structure, shapes and dtypes of the element; the error.
      checksum: of the element's values, where all processes read the same; else 0.
    """

    kind: str
    text: str = ""
    checksum: int = 0


def describe_element(tree: HostTree, is_stacked: bool, *, is_own: bool) -> Said:
    """Returns what is compared of one element or, stacked, of several: leaves [k, R, B, ...]."""
    shapes = ", ".join(
        f"{leaf.dtype}{list(leaf.shape if is_stacked else leaf.shape[1:])}" for leaf in tree.leaves
    )
    checksum = 0
    for leaf in () if is_own else tree.leaves:
        checksum = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, checksum)
    return Said(ELEMENT, f"{shapes} in {tree.treedef}", checksum)


def agree_on_element(joined: Job, said: Said, partial: str, *, is_own: bool) -> str:
    """Returns what all processes do next: ELEMENT or ENDED.

    A process whose data has ended takes a masked copy of its last element where others go on.

    Args:
      joined: the job.
      said: what this process has come to.
      partial: what happens where the data of some end first.
      is_own: whether each process reads data of its own.

    Raises:
      AgreementError: different elements where all read the same, or of different shapes.
      BatchError: the data of some ends first, and nothing says that this is meant.
      PeerLostError: the source of another process has failed; it has its text.
    """
    texts = exchange(joined, _OCCASION, json.dumps(said), joined.timeouts.phase)
    everyone = [Said(*json.loads(text)) for text in texts]
    failed = [i for i, other in enumerate(everyone) if other.kind == FAILED]
    if failed and said.kind != FAILED:
        raise PeerLostError(_failed_text(joined, failed[0], everyone[failed[0]].text))
    ended = [i for i, other in enumerate(everyone) if other.kind == ENDED]
    if failed or len(ended) == len(everyone):
        return ENDED
    _require_equal(joined, everyone)
    if not ended:
        return ELEMENT
    if not is_own:
        raise AgreementError(_shorter_text(joined, ended))
    if partial == DROP:
        return ENDED
    is_empty = any(everyone[i].text == EMPTY for i in ended)
    if partial == PAD and not is_empty:
        return ELEMENT
    raise BatchError(_uneven_text(joined, ended, is_empty))


def _require_equal(joined: Job, everyone: Sequence[Said]) -> None:
    (first, expected), *others = [(i, s) for i, s in enumerate(everyone) if s.kind != ENDED]
    for process, said in others:
        if said != expected:
            raise AgreementError(_different_text(joined, (first, expected), (process, said)))


def _different_text(joined: Job, first: tuple[int, Said], second: tuple[int, Said]) -> str:
    is_value = first[1].text == second[1].text
    show = lambda said: f"values of checksum {said.checksum:08x}" if is_value else said.text
    return message(
        f"{_OCCASION} needs to be equal on all processes, and that of "
        f"{joined.name_process(second[0])} is another one",
        got=f"{show(second[1])} there; {show(first[1])} on process {first[0]}",
        why="each process takes its rows of one global batch: of different batches some examples "
        "would count twice and others never",
        fix="shuffle with the same seed on every process, and drop nothing on one alone; where "
        "each reads files of its own: dj.InputOptions(shard='own') and batches of one shape",
    )


def _shorter_text(joined: Job, ended: Sequence[int]) -> str:
    return message(
        f"{_OCCASION} needs to be there on all processes",
        got=f"the end of the data on {', '.join(map(joined.name_process, ended))}",
        why="all processes read the same global batches, and the others have more of them",
        fix="give every process the same data; where each reads files of its own: "
        "dj.InputOptions(shard='own', partial='pad')",
    )


def _uneven_text(joined: Job, ended: Sequence[int], is_empty: bool) -> str:
    names = ", ".join(map(joined.name_process, ended))
    return message(
        f"{_OCCASION} needs to be there on all processes",
        got=f"the end of the data on {names}" + (", without any element" if is_empty else ""),
        why="all replicas run one program, and none may be without input",
        fix="dj.InputOptions(partial='pad') and next(iterator): who has ended goes on with its "
        "last element, which a mask leaves out; or partial='drop': all stop there",
    )


def _failed_text(joined: Job, process: int, text: str) -> str:
    return message(
        f"{_OCCASION} needs to be there on all processes",
        got=f"an error of the data source on {joined.name_process(process)}: {text}",
        why="all replicas run one program, and none may be without input",
        fix="mend what that process reads, and start the job again",
    )
