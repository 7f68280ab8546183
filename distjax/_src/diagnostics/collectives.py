"""The collectives of a program, each with its bytes and the user's line.

As written: the lowered program (StableHLO) has one operation for each collective in the code. As
compiled: XLA has combined some, moved others, and inserted some for sharded arrays. Two programs
that move the same bytes with the same collectives have the same communication cost. The counts are
static: a collective in the body of a loop is one operation, however often the loop runs.

Both texts carry call stacks, from which the user's line is read. Many operations are staged from
distjax's own files: the line is that of the innermost frame that is in the user's code. A merge is
emitted long after its `merge_call` was traced, so its operations are staged in a named scope, whose
number leads back to that call.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from distjax._src.program.jit import LoweredProgram
from distjax._src.tables import Table, format_bytes
from distjax._src.typing import PyTree
from distjax._src.user_lines import UNKNOWN, SourceFrame, find_line
from distjax._src.variables.state import COMBINED_WRITES, PARTS_OF

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
    "all-to-all",
)

# "name = type opcode(": a type contains neither the "%" of an operand nor the quotes
# of metadata, so the opcode found is the instruction's own. Of an asynchronous
# pair only "-done" counts: its type is that of the result, while that of "-start"
# also lists operands and context buffers for some kinds.
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT\s+)?%?[\w.\-]+\s+=\s+(?P<type>[^\"%]*?)"
    rf"\s(?P<kind>{'|'.join(KINDS)})(?:-done)?\((?P<rest>.*)",
    re.MULTILINE,
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\]")
_BITS_WITHOUT_WIDTH = {"pred": 8, "token": 0}


class CollectiveCount(NamedTuple):
    """The number of collectives of one kind, and the bytes of their results.

    Attributes:
      num_ops: instructions; one that reduces several arrays at once counts once.
      result_bytes: bytes of all results, on one device.
    """

    num_ops: int
    result_bytes: int


def count_collectives(hlo_text: str) -> dict[str, CollectiveCount]:
    """Returns the collectives of a compiled program, by kind.

    Args:
      hlo_text: the text of an optimized HLO module, as returned by
        `compiled.as_text()`. The text of a program that is only lowered (StableHLO)
        has no HLO instructions and gives an empty result.

    Returns:
      A dictionary from kind (one of `KINDS`) to its `CollectiveCount`, without kinds
      that do not occur. An asynchronous pair counts once.

    Example:
      >>> count_collectives("  %sum = (f32[4]{0}, s8[]) all-reduce(%a, %b)")
      {'all-reduce': CollectiveCount(num_ops=1, result_bytes=17)}

      A data-parallel mean on 8 devices is one all-reduce of four bytes:

      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import Mesh, PartitionSpec
      >>> mesh = Mesh(jax.devices()[:8], "replica")
      >>> mean = jax.shard_map(
      ...     lambda x: jax.lax.pmean(x.mean(), "replica"),
      ...     mesh=mesh,
      ...     in_specs=PartitionSpec("replica"),
      ...     out_specs=PartitionSpec(),
      ... )
      >>> program = jax.jit(mean).lower(jnp.ones(16)).compile()
      >>> count_collectives(program.as_text())["all-reduce"]
      CollectiveCount(num_ops=1, result_bytes=4)
    """
    return count_by_kind((kind, size) for kind, size, _ in collective_instructions(hlo_text))


def count_by_axis(
    hlo_text: str, sizes: Mapping[str, int]
) -> dict[tuple[str, str], CollectiveCount]:
    """Returns the collectives of a compiled program, by kind and axes of the mesh.

    Args:
      hlo_text: as for `count_collectives`.
      sizes: name -> size of the axes of the mesh, as ``strategy.mesh.shape``.

    Example:
      >>> text = "  %sum = f32[4]{0} all-reduce(%a), replica_groups={{0,1},{2,3}}, to_apply=%add"
      >>> count_by_axis(text, {"replica": 2, "model": 2})
      {('all-reduce', 'model'): CollectiveCount(num_ops=1, result_bytes=16)}
    """
    found = collective_instructions(hlo_text)
    return count_by_kind(
        ((kind, axes_of(rest.partition("replica_groups=")[2], sizes)), size)
        for kind, size, rest in found
    )


_Key = TypeVar("_Key")


def count_by_kind(sizes: Iterable[tuple[_Key, int]]) -> dict[_Key, CollectiveCount]:
    """Returns the collectives by kind, given the kind and the bytes of each one."""
    counts: dict[_Key, CollectiveCount] = {}
    for kind, size in sizes:
        num_ops, result_bytes = counts.get(kind, (0, 0))
        counts[kind] = CollectiveCount(num_ops + 1, result_bytes + size)
    return counts


def collective_instructions(hlo_text: str) -> Iterator[tuple[str, int, str]]:
    """Yields the kind, the result bytes and the rest of the line of each collective."""
    for found in _INSTRUCTION.finditer(hlo_text):
        yield found["kind"], type_bytes(found["type"]), found["rest"]


def type_bytes(hlo_type: str) -> int:
    """Returns the size of a value of an HLO type; for a tuple, the sum over its parts.

    Args:
      hlo_type: a type in HLO syntax, with or without a layout.

    Returns:
      Bytes without padding. A bounded dimension (`<=8`) counts at its bound; each
      array of packed 2- or 4-bit elements is rounded up to a byte.

    Example:
      >>> type_bytes("(f32[2,3]{1,0:T(8,128)}, /*index=1*/bf16[], s4[3])")
      28
    """
    return sum(array_bytes(array["dtype"], array["dims"]) for array in _ARRAY.finditer(hlo_type))


def array_bytes(dtype: str, dims: str) -> int:
    num_elements = math.prod(int(dim.strip("<= ")) for dim in dims.split(",") if dim)
    return math.ceil(num_elements * _element_bits(dtype) / 8)


def _element_bits(dtype: str) -> int:
    # The first number in the name is the width: f8e4m3fn has 8 bits, c64 has 64.
    width = re.search(r"\d+", dtype)
    return int(width[0]) if width else _BITS_WITHOUT_WIDTH[dtype]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Attributes:
      kind: one of `KINDS`.
      result_bytes: bytes of its result, on one device.
      source: the user's line, "file:line (function)".
      over: the axes of the mesh that it runs over, as "replica" or "model"; "" where there are
        no model axes.
    """

    kind: str
    result_bytes: int
    source: str
    over: str = ""


def collective_table(caption: str, collectives: Sequence[Collective]) -> Table:
    """Returns a table of collectives, each with its bytes and line, and its axes if known."""
    if any(c.over for c in collectives):
        axes = tuple((c.kind, c.over, format_bytes(c.result_bytes), c.source) for c in collectives)
        return Table(caption, ("kind", "over", "bytes", "line"), axes)
    rows = tuple((c.kind, format_bytes(c.result_bytes), c.source) for c in collectives)
    return Table(caption, ("kind", "bytes", "line"), rows)


# -- as written ---------------------------------------------------------------

_LOWERED_KINDS = {f"stablehlo.{kind.replace('-', '_')}": kind for kind in KINDS}
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*(?:<f\d+)?)")
#: Element types that MLIR spells differently from HLO.
_HLO_DTYPES = {"i1": "pred", "complex<f32": "c64", "complex<f64": "c128"}
# "function"("file":line:column; a name before any other parenthesis is a scope.
_FRAME = re.compile(r'"([^"]*)"\("([^"]*)":(\d+):')
_NAME = re.compile(r'"([^"]*)"\((?!")')


def list_lowered(
    lowered: LoweredProgram | jax.stages.Lowered,
    merge_lines: Sequence[str],
    sizes: Mapping[str, int],
) -> list[Collective]:
    """Returns the collectives of a lowered program, in text order.

    `merge_lines` has the line of the `merge_call` of each emitted merge; without the sizes of the
    axes of the mesh, these are not told.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    callers = {
        str(op.attributes["callee"]).removeprefix("@"): str(op.location)
        for op, _ in _operations(module.operation, ())
        if op.name == "func.call"
    }
    return [
        Collective(
            _LOWERED_KINDS[op.name],
            sum(_tensor_bytes(str(result.type)) for result in op.results),
            _line_of_lowered((str(op.location), *around), callers, merge_lines),
            _axes_of_lowered(op.attributes, sizes),
        )
        for op, around in _operations(module.operation, ())
        if op.name in _LOWERED_KINDS
    ]


def _axes_of_lowered(attributes: PyTree, sizes: Mapping[str, int]) -> str:
    if not sizes or "replica_groups" not in attributes:
        return ""
    groups = attributes["replica_groups"]
    ids = np.asarray(groups)  # as text, the ids of many devices are hexadecimal
    return axes_of(str(groups if ids.dtype == object else ids.tolist()), sizes)


def _operations(op: Any, around: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yields each operation with the locations of its ancestors, innermost first."""
    yield op, around
    place = str(op.attributes["sym_name"] if op.name == "func.func" else op.location)
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operations(inner.operation, (place, *around))


def _line_of_lowered(
    places: Sequence[str], callers: dict[str, str], merge_lines: Sequence[str]
) -> str:
    """Returns the user's line of an operation, or of a call or `shard_map` around it."""
    seen: set[str] = set()
    trail = list(places)
    names, frames = [], []
    while trail:
        place = trail.pop(0)
        function = place.strip('"')
        if function in callers and function not in seen:
            seen.add(function)
            trail.insert(0, callers[function])
            continue
        names[:0] = _NAME.findall(place)
        frames += [SourceFrame(f, file, int(n)) for f, file, n in _FRAME.findall(place)]
    return user_line(frames, "/".join(names), merge_lines) or UNKNOWN


def _tensor_bytes(type_text: str) -> int:
    """Returns the bytes of an MLIR tensor type: tensor<4x3xbf16> as bf16[4,3]."""
    dims, dtype = _TENSOR.search(type_text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return type_bytes(f"{_HLO_DTYPES.get(dtype, dtype)}[{dims.rstrip('x').replace('x', ',')}]")


# -- as compiled ---------------------------------------------------------------

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")


def list_compiled(
    hlo_text: str, merge_lines: Sequence[str], sizes: Mapping[str, int]
) -> list[Collective]:
    """Returns the collectives in the text of a compiled program; arguments as `list_lowered`."""
    stacks = _Stacks(hlo_text)
    found = []
    for kind, result_bytes, rest in collective_instructions(hlo_text):
        name, frame_id = _OP_NAME.search(rest), _FRAME_ID.search(rest)
        frames = stacks.frames(int(frame_id[1])) if frame_id else []
        line = user_line(frames, name[1] if name else "", merge_lines)
        over = axes_of(rest.partition("replica_groups=")[2], sizes)
        found.append(Collective(kind, result_bytes, line or UNKNOWN, over))
    return found


class _Stacks:
    """The call stacks in HLO text, which stores them in four tables at its head."""

    def __init__(self, hlo_text: str):
        self._files = _entries(hlo_text, "FileNames", r'"(.*)"')
        self._functions = _entries(hlo_text, "FunctionNames", r'"(.*)"')
        self._places = _entries(
            hlo_text,
            "FileLocations",
            r"\{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)",
        )
        self._frames = _entries(
            hlo_text, "StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
        )

    def frames(self, frame_id: int) -> list[SourceFrame]:
        """Returns the stack of a frame, innermost first."""
        found = []
        while frame_id in self._frames:
            place, parent = self._frames[frame_id]
            file, function, line = self._places[int(place)]
            name = self._functions[int(function)][0]
            found.append(SourceFrame(name, self._files[int(file)][0], int(line)))
            frame_id = int(parent or 1) - 1  # XLA prints the number of the parent plus one
        return found


def _entries(hlo_text: str, table: str, pattern: str) -> dict[int, tuple[str, ...]]:
    """Returns the numbered lines of one table, each as the groups of `pattern`."""
    section = re.search(rf"^{table}\n((?:\d+ .*\n)*)", hlo_text, re.MULTILINE)
    lines = section[1] if section else ""
    return {
        int(match[1]): match.groups()[1:]
        for match in re.finditer(rf"^(\d+) {pattern}", lines, re.MULTILINE)
    }


# -- the user's line ------------------------------------------------------------

#: Stands for the line of a library's operation in an unobserved merge, as in a cut for servers.
IN_A_MERGE = "a merge function"

#: The frames that separate the merge function's stack from that of the program's caller.
_MERGE_BOUNDARIES = (
    "UserMerge.emit",
    "UserMerge.trace_for_shapes.<locals>.traced",
    "call_as_reduction.<locals>.call",
)
_SCOPE = re.compile(r"distjax_merge_(\d+)")


def merge_scope(index: int) -> str:
    """Returns the name under which the operations of merge `index` are staged."""
    return f"distjax_merge_{index}"


def user_line(frames: Sequence[SourceFrame], names: str, merge_lines: Sequence[str]) -> str | None:
    """Returns "file:line (function)" of the user's innermost frame, or None.

    If the merge function belongs to a library, the line is that of the `merge_call`, found by
    `names`: the scopes "a/b/c" that the operation was staged in. What no line asks for, but the
    state of a step with objects, has a name in place of the line.
    """
    if parts := PARTS_OF.search(names):
        return f"parts of {parts[1]}, gathered for the step"
    if COMBINED_WRITES in names:
        return "metrics and statistics, combined after the step"
    own = list(itertools.takewhile(lambda f: not f.function.endswith(_MERGE_BOUNDARIES), frames))
    if len(own) == len(frames):
        return find_line(own)
    scopes = _SCOPE.findall(names)
    return find_line(own, merge_lines[int(scopes[-1])] if scopes else None) or IN_A_MERGE


# -- over which axes of the mesh a collective runs -----------------------------
# Over which axes of the mesh a collective runs, from the groups of devices that it names.
#
# XLA and StableHLO spell these groups in five ways; a device is numbered by its place in the mesh.


_NUMBERS = r"[\d, ]*"
_LISTED = re.compile(rf"[\[{{]({_NUMBERS})[\]}}]")
_IOTA = re.compile(rf"^\[(\d+),(\d+)\]<=\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?")
_MESH = re.compile(
    r"^mesh\[([^\]]*)\]"
    rf"(?:, device_ids=\(\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?\))? \{{([^}}]*)\}}"
)
_AXES = re.compile(r"replica_group_mesh_axes<.*?axes = \[(.*?)\]>", re.DOTALL)


def axes_of(groups: str, sizes: Mapping[str, int]) -> str:
    """Returns the axes that groups of devices run over: "model", "replica, model", or none of them.

    Groups that are parts of those of an axis are "part of replica". They are spelled as after
    "replica_groups=", to the end of the line or further.
    """
    named = _AXES.search(groups)
    if not sizes or (named and "sub_axis" not in named[1]):
        return ", ".join(re.findall(r'name = "([^"]*)"', named[1])) if sizes and named else ""
    found = groups_of(groups, int(np.prod([*sizes.values()])))
    if found is None:
        return ""
    names = [name for name, size in sizes.items() if size > 1]
    choices = [c for n in range(len(names) + 1) for c in itertools.combinations(names, n)]
    for chosen in choices:
        if found == _groups_over(chosen, sizes):
            return ", ".join(chosen)
    for chosen in choices:
        whole = _groups_over(chosen, sizes)
        if all(any(group <= other for other in whole) for group in found):
            return f"part of {', '.join(chosen)}"
    return ""


def groups_of(text: str, count: int) -> set[frozenset[int]] | None:
    """Returns the groups of `count` devices, as in `axes_of`; None: not understood."""
    text = text.strip()
    if text.startswith("{}"):
        return {frozenset(range(count))}
    if found := _IOTA.match(text):
        ids = _iota(found[3], found[4])
        return _rows(ids.reshape(int(found[1]), int(found[2])))
    if found := _MESH.match(text):
        sizes = {k.strip("' "): int(n) for k, n in (x.split("=") for x in found[1].split(","))}
        wanted = [name.strip("' ") for name in found[4].split(",")]
        if any(name not in sizes for name in wanted):  # parts of an axis
            return None
        ids = _iota(found[2], found[3]) if found[2] else np.arange(count)
        return _along(ids.reshape([*sizes.values()]), [list(sizes).index(n) for n in wanted])
    text = text.partition("}}")[0]
    listed = [_integers(own) for own in _LISTED.findall(text + "}")]
    return {frozenset(own) for own in listed if own} or None


def _iota(dims: str, order: str | None) -> np.ndarray:
    ids = np.arange(int(np.prod(_integers(dims)))).reshape(_integers(dims))
    return ids.transpose(_integers(order)) if order else ids


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]


def _groups_over(names: Iterable[str], sizes: Mapping[str, int]) -> set[frozenset[int]]:
    ids = np.arange(int(np.prod([*sizes.values()]))).reshape([*sizes.values()])
    return _along(ids, [list(sizes).index(name) for name in names])


def _along(ids: np.ndarray, axes: list[int]) -> set[frozenset[int]]:
    moved = np.moveaxis(ids, axes, range(ids.ndim - len(axes), ids.ndim))
    return _rows(moved.reshape(-1, int(np.prod([ids.shape[a] for a in axes], dtype=int))))


def _rows(ids: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(map(int, row)) for row in ids}
