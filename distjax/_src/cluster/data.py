"""What the processes of a job compare at each element of a dataset, and do about it.

They compare where the loop takes elements, not on the prefetch threads, each of which is
at its own position. So a forgotten shuffle seed, files of different lengths or an error on
one process is found before the element is used.
"""

from __future__ import annotations

import base64
import contextlib
import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from distjax._src import hooks
from distjax._src.cluster.job import Job, job, on_joined
from distjax._src.cluster.joining import warn_once
from distjax._src.cluster.ledger import phase
from distjax._src.cluster.meeting import describe_structure, exchange
from distjax._src.data.elements import HostTree, as_batch
from distjax._src.data.input_layout import Block, InputLayout
from distjax._src.data.options import DROP, PAD, Batch, Partial
from distjax.errors import (
    AgreementError,
    BatchError,
    PeerLostError,
    as_part,
    describe_error,
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


class JobReaders:
    """The processes of a job that read one dataset: a `data.iterator.Together`."""

    def __init__(self, joined: Job, layout: InputLayout, partial: Partial):
        self._job, self._is_own, self._num_rows = joined, layout.is_own, layout.num_rows
        self._partial = partial
        self._latest: HostTree | None = None  # what masked copies are of

    @property
    def process(self) -> list[int] | None:
        """This process's number and the total, if each reads its own data."""
        return [self._job.process_id, self._job.num_processes] if self._is_own else None

    def waiting(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the others wait for this process's data."""
        return phase("waiting for data")

    def reset(self) -> None:
        """Forgets what was read: the iterator goes to another position."""
        self._latest = None

    def describe(self, block: Block) -> Report:
        """Returns the report to compare for elements, on the thread that has read them."""
        is_first = block.positions[0].delivered == 1
        return describe_elements(block.tree, is_own=self._is_own, is_first=is_first)

    def _describe_end(self, end: BaseException) -> Report:
        if not isinstance(end, StopIteration):
            return Report(FAILED, describe_error(end))
        size = _num_padded_rows(self._latest, 1, is_own=self._is_own)
        return Report(ENDED, "" if self._latest is not None else EMPTY, num_padded=size)

    def agree(
        self, block: Block | None, own: Report | BaseException, steps: int | None
    ) -> HostTree | None:
        """Returns elements to take in place of `block`, this process's; None: these.

        `own` is its report, or with what its data has ended; `steps` how many it has asked for, as
        steps of a loop. With "pad", a process that has fewer elements than others, or smaller ones,
        adds masked copies. Raises what all others raise too, or StopIteration where all stop.
        """
        joined, report = self._job, own if isinstance(own, Report) else self._describe_end(own)
        occasion = _OCCASION if steps is None else f"the next {steps} steps of a dataset"
        texts = exchange(joined, occasion, json.dumps(report), joined.timeouts.step_deadline)
        reports = [Report(*json.loads(text)) for text in texts]
        failed = [i for i, other in enumerate(reports) if other.kind == FAILED]
        if failed and report.kind != FAILED:
            raise PeerLostError(_failed_text(joined, failed[0], reports[failed[0]].text))
        ended = [i for i, other in enumerate(reports) if other.kind == ENDED]
        if failed or len(ended) == len(reports):
            return None
        _require_equal(joined, reports, is_own=self._is_own)
        checksums = {other.checksum for other in reports}
        if self._is_own and report.checksum and len(checksums) == 1:
            warn_once("equal data", _equal_text(joined))
        counts = [other.num_elements for other in reports]
        count = self._count(counts, ended)
        pads = self._partial == PAD and self._is_own
        if pads and block is not None:
            self._latest = block.element(len(block) - 1).tree
        if pads and any(reports[i].text == EMPTY for i in ended):
            example = _receive_example(joined, counts.index(count), self._latest, self._num_rows)
            self._latest = self._latest or example
        num_padded = max(other.num_padded for other in reports)
        if count == report.num_elements and num_padded in (0, report.num_padded):
            return None
        return self._cut(block, count, num_padded)

    def _count(self, counts: Sequence[int], ended: Sequence[int]) -> int:
        """Returns how many elements all take."""
        if len(set(counts)) == 1:
            return counts[0]
        if not self._is_own:
            raise AgreementError(_shorter_text(self._job, ended))
        if self._partial == PAD:
            return max(counts)
        if self._partial != DROP:
            fewer = [i for i, count in enumerate(counts) if count < max(counts)]
            raise BatchError(_uneven_text(self._job, fewer))
        if not min(counts):
            raise StopIteration
        return min(counts)

    def _cut(self, block: Block | None, count: int, size: int) -> HostTree:
        """Returns `count` elements: those of `block`, then masked copies of the latest.

        Each has `size` rows a replica if that is not 0, as those of other processes have.
        """
        tree = None if block is None else block.tree
        if size and tree is not None:
            tree = _padded_rows(tree, 2, size)
        if size and self._latest is not None:
            self._latest = _padded_rows(self._latest, 1, size)
        missing = count - (0 if block is None else len(block))
        if missing <= 0:
            assert tree is not None, "count is not 0"
            return HostTree(tree.treedef, [leaf[:count] for leaf in tree.leaves])
        assert self._latest is not None, "without an element, one receives an example"
        treedef, (*data, mask) = self._latest  # of a `Batch`
        masked = [np.stack([leaf] * missing) for leaf in (*data, np.zeros_like(mask))]
        if tree is not None:
            masked = [np.concatenate(pair) for pair in zip(tree.leaves, masked, strict=True)]
        return HostTree(treedef, masked)


def join_readers(layout: InputLayout, partial: Partial) -> JobReaders | None:
    """Returns the processes that read together; None: this one reads alone."""
    joined = job() if layout.spans_processes else None
    return None if joined is None else JobReaders(joined, layout, partial)


def _num_padded_rows(tree: HostTree | None, axis: int, *, is_own: bool) -> int:
    """Returns B of elements [..., R, B, ...] that may be padded, else 0; axis: which one B is."""
    if not is_own or tree is None:
        return 0
    is_batch = isinstance(jax.tree.unflatten(tree.treedef, tree.leaves), Batch)
    return tree.leaves[-1].shape[axis] if is_batch and tree.leaves[-1].ndim > axis else 0


def _padded_rows(tree: HostTree, axis: int, size: int) -> HostTree:
    """Returns a `Batch` with copies of its last rows, which its mask leaves out, up to B = size."""
    treedef, (*data, mask) = tree.last_example(axis)
    return tree.filled(size, HostTree(treedef, [*data, np.zeros_like(mask)]), axis)


def describe_elements(tree: HostTree, *, is_own: bool, is_first: bool = False) -> Report:
    """Returns the report to compare for some elements, leaves [k, R, B, ...]."""
    num_padded = _num_padded_rows(tree, 2, is_own=is_own)
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


def _receive_example(job: Job, sender: int, tree: HostTree | None, num_rows: int) -> HostTree:
    """Returns copies [R, B, ...] of another process's example, for one that never had any.

    The example is sent as numbers, through the coordination service. Raises a BatchError if its
    structure is not made of dicts, lists and tuples.
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


on_joined.append(lambda: hooks.readers.append(join_readers))
