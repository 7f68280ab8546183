"""What the processes of a job compare at each element of a dataset.

They compare where the loop takes elements, not on the prefetch threads, each of which is
at its own position. So a forgotten shuffle seed, files of different lengths or an error on
one process is found before the element is used.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from distjax.cluster.alone import warn_once
from distjax.cluster.facts import describe_structure
from distjax.cluster.job import Job
from distjax.cluster.meeting import exchange
from distjax.data.batch import Batch
from distjax.data.elements import HostTree
from distjax.data.options import DROP, PAD, Partial
from distjax.data.splitting import as_batch
from distjax.errors import (
    AgreementError,
    BatchError,
    PeerLostError,
    as_part,
    describe_value,
    message,
)

ELEMENT, ENDED, FAILED = "element", "ended", "failed"

#: What a process reports that reaches the end without ever having had an element.
EMPTY = "without any element"

_OCCASION = "the next element of a dataset"


class Report(NamedTuple):
    """What a process reports at its next element.

    Attributes:
      kind: an element, the end of its data, or an error of its source.
      text: structure, shapes and dtypes of the element; or the error.
      checksum: of the element's values if all processes read the same data; if each reads its own,
        of its first element's, unless they are constants; else 0.
      num_elements: how many elements, all of one shape, it has ready.
      num_padded: B, if processes may pad theirs to that of others; else 0.
    """

    kind: str
    text: str = ""
    checksum: int = 0
    num_elements: int = 0
    num_padded: int = 0


class Next(NamedTuple):
    """What all processes do next.

    Attributes:
      num_elements: how many elements they take; 0: the data has ended.
      sender: the process that sends an example to those that never had any, or None.
      num_padded: B, to which each pads its own; 0: they are not padded.
    """

    num_elements: int
    sender: int | None = None
    num_padded: int = 0


def num_padded_rows(tree: HostTree | None, axis: int, *, is_own: bool) -> int:
    """Returns B of elements that their process can pad to the size of others'; 0 for any other.

    Args:
      tree: leaves [..., R, B, ...], or None.
      axis: which one B is.
      is_own: whether each process reads its own data.
    """
    if not is_own or tree is None:
        return 0
    is_batch = isinstance(jax.tree.unflatten(tree.treedef, tree.leaves), Batch)
    return tree.leaves[-1].shape[axis] if is_batch and tree.leaves[-1].ndim > axis else 0


def padded_rows(tree: HostTree, axis: int, size: int) -> HostTree:
    """Returns a `Batch` with copies of its last rows, which its mask leaves out, up to B = size."""
    missing = size - tree.leaves[-1].shape[axis]
    if missing <= 0:
        return tree
    *data, mask = tree.leaves
    last = (slice(None),) * axis + (slice(-1, None),)
    rows = [*(x[last] for x in data), np.zeros_like(mask[last])]
    pairs = zip(tree.leaves, rows, strict=True)
    leaves = [np.concatenate([x, np.repeat(row, missing, axis)], axis) for x, row in pairs]
    return HostTree(tree.treedef, leaves)


def describe_elements(tree: HostTree, *, is_own: bool, is_first: bool = False) -> Report:
    """Returns the report to compare for some elements, leaves [k, R, B, ...].

    Args:
      tree: the elements.
      is_own: whether each process reads its own data.
      is_first: whether the data begins with them.
    """
    num_padded = num_padded_rows(tree, 2, is_own=is_own)
    # With own data, R counts this process's replicas.
    first = 3 if num_padded else 2 if is_own else 1
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape[first:])}" for leaf in tree.leaves)
    compared = () if is_own else tree.leaves
    if is_own and is_first and not all(map(_is_constant, tree.leaves)):
        compared = [leaf[:1] for leaf in tree.leaves]
    checksum = 0
    for leaf in compared:
        checksum = zlib.crc32(np.ascontiguousarray(leaf).view(np.uint8).data, checksum)
    text = f"{shapes} in {describe_structure(tree.treedef)}"
    return Report(ELEMENT, text, checksum, len(tree.leaves[0]), num_padded)


def agree_on_elements(
    job: Job, own_report: Report, steps: int | None, partial: Partial, *, is_own: bool
) -> Next:
    """Returns what all processes do next.

    With "pad", a process that has fewer elements than others adds masked copies.

    Args:
      job: the job.
      own_report: this process's report.
      steps: how many elements it has asked for, as steps of a loop; None: one.
      partial: what to do if some processes run out of data first.
      is_own: whether each process reads its own data.

    Raises:
      AgreementError: elements differ though all read the same data, or differ in shape; or
        another number was asked for.
      BatchError: some processes run out of data first, and `partial` does not allow it.
      PeerLostError: the source of another process failed; includes its error text.
    """
    occasion = _OCCASION if steps is None else f"the next {steps} steps of a dataset"
    texts = exchange(job, occasion, json.dumps(own_report), job.timeouts.step_deadline)
    reports = [Report(*json.loads(text)) for text in texts]
    failed = [i for i, other in enumerate(reports) if other.kind == FAILED]
    if failed and own_report.kind != FAILED:
        raise PeerLostError(_failed_text(job, failed[0], reports[failed[0]].text))
    ended = [i for i, other in enumerate(reports) if other.kind == ENDED]
    if failed or len(ended) == len(reports):
        return Next(0)
    _require_equal(job, reports, is_own=is_own)
    if is_own and own_report.checksum and len({report.checksum for report in reports}) == 1:
        warn_once("equal data", _equal_text(job))
    counts = [other.num_elements for other in reports]
    num_padded = max(other.num_padded for other in reports)
    if len(set(counts)) == 1:
        return Next(counts[0], None, num_padded)
    if not is_own:
        raise AgreementError(_shorter_text(job, ended))
    if partial == DROP:
        return Next(min(counts))
    if partial == PAD:
        is_empty = any(reports[i].text == EMPTY for i in ended)
        return Next(max(counts), counts.index(max(counts)) if is_empty else None, num_padded)
    raise BatchError(_uneven_text(job, [i for i, n in enumerate(counts) if n < max(counts)]))


def receive_example(job: Job, sender: int, tree: HostTree | None, num_rows: int) -> HostTree:
    """Returns copies of another process's example, for a process that never had any.

    The example is sent as numbers, through the coordination service.

    Args:
      job: the job.
      sender: the process that sends it.
      tree: this process's element, leaves [R, B, ...], or None.
      num_rows: R.

    Raises:
      BatchError: its structure is not made of dicts, lists and tuples.
    """
    packed = ""
    if job.process_id == sender:
        assert tree is not None, "the sender has an element"
        packed = _pack_example(tree)
    occasion = "an example for a process that has none"
    received = exchange(job, occasion, packed, job.timeouts.step_deadline)[sender]
    if not received:
        raise BatchError(_unserializable_text(job, sender))
    structure, leaves = json.loads(received)
    decode, registry = base64.b64decode, jax.tree_util.default_registry
    data = jax.tree_util.PyTreeDef.deserialize_using_proto(registry, decode(structure))
    *arrays, mask = [
        np.broadcast_to(np.frombuffer(decode(x), np.dtype(name)).reshape(cut), [num_rows, *shape])
        for x, name, cut, shape in leaves
    ]
    return as_batch(HostTree(data, arrays), mask)


def require_position_of(process: list[int] | None, state: object) -> None:
    """Raises a ValueError unless `state` is a position that this process can resume.

    Args:
      process: this process and the job's size, if each process reads its own data, or None.
      state: the position, whose "process" has to be the same.
    """
    saved = state.get("process") if isinstance(state, Mapping) else None
    if saved == process:
        return
    raise ValueError(
        message(
            f"set_state needs a position of {_readers(process)}, not of {_readers(saved)}",
            got=describe_value(state),
            why="what was read of data that each process has of its own says nothing of others'",
            fix="resume with as many processes, or let all read the same global batches: "
            "strategy.distribute_dataset(batches), whose position holds for any number",
        )
    )


def _readers(process: list[int] | None) -> str:
    """Returns whose position it is, for an error text."""
    return "all processes alike" if process is None else f"process {process[0]} of {process[1]}"


def _pack_example(tree: HostTree) -> str:
    """Returns the first example as JSON; "" if its structure cannot be serialized."""
    try:
        structure = tree.treedef.children()[0].serialize_using_proto()  # of a `Batch`
    except Exception:  # unregistered nodes: whatever JAX raises for them
        return ""

    def text(content: bytes) -> str:
        return base64.b64encode(content).decode()

    first = (slice(1),) * tree.leaves[-1].ndim  # the mask's
    examples = [leaf[first] for leaf in tree.leaves]
    leaves = [
        (text(x.tobytes()), x.dtype.name, x.shape, leaf.shape[1:])
        for x, leaf in zip(examples, tree.leaves, strict=True)
    ]
    return json.dumps([text(structure), leaves])


def _is_constant(leaf: np.ndarray) -> bool:
    """Returns whether the first element's values are all one, as zeros of a test or a mask are."""
    first = leaf[0].reshape(-1)
    return bool((first == first[:1]).all())


def _require_equal(job: Job, reports: Sequence[Report], *, is_own: bool) -> None:
    def compared(report: Report) -> Report:
        own = report._replace(num_elements=0, num_padded=0, checksum=0)
        return own if is_own else report

    (first, expected), *others = [(i, s) for i, s in enumerate(reports) if s.kind != ENDED]
    for process, report in others:
        if compared(report) != compared(expected):
            raise AgreementError(_different_text(job, (first, expected), (process, report)))


def _different_text(job: Job, first: tuple[int, Report], second: tuple[int, Report]) -> str:
    is_value = first[1].text == second[1].text

    def show(report: Report) -> str:
        return f"values of checksum {report.checksum:08x}" if is_value else report.text

    return message(
        f"{_OCCASION} needs to be equal on all processes, but {job.name_process(second[0])} "
        "has a different one",
        got=f"{show(second[1])} there; {show(first[1])} on process {first[0]}",
        why="each process takes its rows of one global batch: of different batches some examples "
        "would count twice and others never",
        fix="shuffle with the same seed on every process, and drop nothing on one alone; where "
        "each reads files of its own: dj.InputOptions(shard='own') and batches of one shape",
    )


def _equal_text(job: Job) -> str:
    return message(
        "data that each process has of its own should differ, and the first element is equal on "
        "all processes",
        got=f"the same values on {job.num_processes} processes",
        why="where all read the same data as their own, every example counts once per process",
        fix="shuffle or select by process: np.random.default_rng([seed, jax.process_index()]), or "
        "files[context.input_pipeline_id :: context.num_input_pipelines] in "
        "distribute_datasets_from_function; for data that all have alike: "
        "strategy.distribute_dataset(batches), without shard='own'",
    )


def _shorter_text(job: Job, ended: Sequence[int]) -> str:
    return message(
        f"{_OCCASION} needs to be there on all processes",
        got=f"the end of the data on {', '.join(map(job.name_process, ended))}",
        why="all processes read the same global batches, and the others have more of them",
        fix="give every process the same data; where each reads files of its own: "
        "dj.InputOptions(shard='own', partial='pad')",
    )


def _uneven_text(job: Job, ended: Sequence[int]) -> str:
    return message(
        f"{_OCCASION} needs to be there on all processes",
        got=f"the end of the data on {', '.join(map(job.name_process, ended))}",
        why="all replicas run one program, and none may be without input",
        fix="dj.InputOptions(partial='pad'): a process whose data has ended goes on with its last "
        "element, which a mask leaves out; or partial='drop': all stop there",
    )


def _unserializable_text(job: Job, sender: int) -> str:
    return message(
        f"{_OCCASION} needs to be there on all processes, or to consist of dicts, lists and tuples",
        got=f"no element at all on some, another structure on {job.name_process(sender)}",
        why="a process that never had an element goes on with a copy of another's, which a mask "
        "leaves out; other classes cannot be sent",
        fix="give each process an element, or yield {'x': x, 'y': y}",
    )


def _failed_text(job: Job, process: int, text: str) -> str:
    return message(
        f"{_OCCASION} needs to be there on all processes",
        got=f"an error of the data source on {job.name_process(process)}: {as_part(text)}",
        why="all replicas run one program, and none may be without input",
        fix="fix what that process reads, and start the job again",
    )
