"""The collectives of a program, each with its bytes and the user's line.

As written: the lowered program (StableHLO) has one operation for each collective in the
code. As compiled: XLA has combined some and inserted others for sharded arrays.
Both carry call stacks, from which the user's line is read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from distjax.diagnostics import hlo, sources
from distjax.program.ahead import LoweredProgram
from distjax.tables import Table, format_bytes
from distjax.user_lines import UNKNOWN, SourceFrame


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a program.

    Attributes:
      kind: one of `hlo.KINDS`.
      result_bytes: bytes of its result, on one device.
      source: the user's line, "file:line (function)".
    """

    kind: str
    result_bytes: int
    source: str


def collective_table(caption: str, collectives: Sequence[Collective]) -> Table:
    """Returns a table of collectives, each with its bytes and line."""
    rows = tuple((c.kind, format_bytes(c.result_bytes), c.source) for c in collectives)
    return Table(caption, ("kind", "bytes", "line"), rows)


# -- as written ---------------------------------------------------------------

_LOWERED_KINDS = {f"stablehlo.{kind.replace('-', '_')}": kind for kind in hlo.KINDS}
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*(?:<f\d+)?)")
#: Element types that MLIR spells differently from HLO.
_HLO_DTYPES = {"i1": "pred", "complex<f32": "c64", "complex<f64": "c128"}
# "function"("file":line:column; a name before any other parenthesis is a scope.
_FRAME = re.compile(r'"([^"]*)"\("([^"]*)":(\d+):')
_NAME = re.compile(r'"([^"]*)"\((?!")')


def list_lowered(
    lowered: LoweredProgram | jax.stages.Lowered, merge_lines: Sequence[str]
) -> list[Collective]:
    """Returns the collectives of a lowered program, in text order."""
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
        )
        for op, around in _operations(module.operation, ())
        if op.name in _LOWERED_KINDS
    ]


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
    return sources.user_line(frames, "/".join(names), merge_lines) or UNKNOWN


def _tensor_bytes(type_text: str) -> int:
    """Returns the bytes of an MLIR tensor type: tensor<4x3xbf16> as bf16[4,3]."""
    dims, dtype = _TENSOR.search(type_text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return hlo.type_bytes(f"{_HLO_DTYPES.get(dtype, dtype)}[{dims.rstrip('x').replace('x', ',')}]")


# -- as compiled ---------------------------------------------------------------

_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME_ID = re.compile(r"stack_frame_id=(\d+)")


def list_compiled(hlo_text: str, merge_lines: Sequence[str]) -> list[Collective]:
    """Returns the collectives in the text of a compiled program."""
    stacks = _Stacks(hlo_text)
    found = []
    for kind, result_bytes, rest in hlo.collective_instructions(hlo_text):
        name, frame_id = _OP_NAME.search(rest), _FRAME_ID.search(rest)
        frames = stacks.frames(int(frame_id[1])) if frame_id else []
        line = sources.user_line(frames, name[1] if name else "", merge_lines)
        found.append(Collective(kind, result_bytes, line or UNKNOWN))
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
