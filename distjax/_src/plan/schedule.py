"""What a compiled program holds in memory while it runs: liveness over its scheduled HLO.

The compiler says how many bytes of temporaries a program needs, but not what they are. Its text is
in the order of execution, so which values are alive at once can be read from it: from where a value
is computed to its last use. A value that only renames another (a tuple, a bitcast, the end of an
asynchronous copy, the carry of a loop) has no memory of its own, and neither has one that becomes a
result. TPUs also have a table of the parts of each result that has several, in any memory. What the
compiler needs beyond the sum (gaps, alignment, constants) stays unattributed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distjax._src.diagnostics.collectives import KINDS, array_bytes
from distjax._src.jax_compat import TABLE_BYTES

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(([^)]*)\)?(.*)")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|\w+_computations?)=\{?%?([\w.\-%, ]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+)")

#: What computes no value of its own.
_RENAMES = frozenset(
    "bitcast get-tuple-element tuple optimization-barrier while dynamic-update-slice "
    "add-dependency".split()
)
#: What needs no memory that the program allocates.
_NO_MEMORY = frozenset("parameter constant iota partition-id replica-id after-all".split())
_WORK = frozenset("fusion convolution dot custom-call while call scatter gather sort".split())


class Instruction(NamedTuple):
    """One instruction; `inside` is the text of its operands, `rest` that of its attributes."""

    is_root: bool
    name: str
    type: str
    opcode: str
    inside: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.\-]+)", self.inside)

    @property
    def scope(self) -> str:
        """The scopes that it was staged in, "a/b/c"; of an argument, its path."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1].replace("\\'", "'") if found else ""


class Live(NamedTuple):
    """A value in memory: its bytes as laid out, and whether it meets a reduction over devices."""

    bytes: int
    made_by: Instruction
    is_reduced: bool


class Schedule:
    """A compiled program, read from the text of its scheduled module.

    Attributes:
      instructions: those of the program itself, in the order of execution.
      aliases: maps the results that reuse the memory of an argument to its number.
      everywhere: the instructions of all computations, by name.
      live_bytes: the bytes of temporaries that are alive at each instruction.
      at_peak: the temporaries that are alive where most are.
    """

    def __init__(self, hlo_text: str):
        self._computations: dict[str, list[Instruction]] = {}
        self.instructions: list[Instruction] = []
        current = self.instructions
        for line in hlo_text.splitlines():
            if found := _LINE.match(line):
                current.append(Instruction(bool(found[1]), *found.groups()[1:]))
            elif head := _HEAD.match(line):
                current = self.instructions if head[1] else []
                self._computations[head[2]] = current
        head = hlo_text.partition("\n")[0].partition("input_output_alias={")[2]
        pairs = _ALIAS.findall(head.partition("entry_computation")[0])
        self.aliases = {int(i.split(",")[0] or 0): int(number) for i, number in pairs}
        self.everywhere = {i.name: i for order in self._computations.values() for i in order}
        self.live_bytes, self.at_peak = self._walk(self.instructions)
        if ":T(" in hlo_text:  # tiles, so it is for a TPU: tables last as long as the program
            own = (i for i in self.everywhere.values() if i.opcode not in _NO_MEMORY)
            owners = [i for i in own if i.type.startswith("(") and not _renames(i)]
            tables = [Live(TABLE_BYTES, i, False) for i in owners]
            self.at_peak += tables
            self.live_bytes = [n + len(tables) * TABLE_BYTES for n in self.live_bytes]

    def parameters(self) -> dict[int, Instruction]:
        """The arguments, by number; what the program does not use is not among them."""
        found = (i for i in self.instructions if i.opcode == "parameter")
        return {int(i.inside): i for i in found}

    def results(self) -> list[str]:
        """The types of the results."""
        return [m[0] for i in self.instructions if i.is_root for m in _ARRAY.finditer(i.type)]

    def collectives(self) -> Iterator[tuple[Instruction, float | None, bool]]:
        """Yields each collective of the text, of an asynchronous pair the end.

        With its place, from 0 to 1 (None: in another computation), and whether other work is
        scheduled while it runs.
        """
        for order in self._computations.values():
            places = {each.name: place for place, each in enumerate(order)}
            for place, each in enumerate(order):
                if each.opcode.removesuffix("-done") in KINDS:
                    is_pair = each.opcode.endswith("-done")
                    since = min(places.get(o, place) for o in each.operands) if is_pair else place
                    overlaps = any(i.opcode in _WORK for i in order[since + 1 : place])
                    yield each, place / len(order) if order is self.instructions else None, overlaps

    def _walk(self, order: Sequence[Instruction]) -> tuple[list[int], list[Live]]:
        """Returns the bytes that are alive at each instruction, and the values at the peak."""
        owners, last = _owners(order), dict[str, int]()
        pending: dict[str, list[str]] = {}
        reduced: set[str] = set()
        for place, each in enumerate(order):
            if each.opcode.endswith("-start"):
                pending[each.name] = each.operands
            read = [o for start in each.operands for o in pending.get(start, ())]
            for operand in (each.name, *each.operands, *read):
                last |= dict.fromkeys(owners.get(operand, ()), place)
            if each.opcode.startswith(("all-reduce", "reduce-scatter")):
                reduced.update(*(owners.get(name, ()) for name in (each.name, *each.operands)))
        kept = {o for i in order if i.is_root for o in owners.get(i.name, ())}
        total, peak, best = 0, -1, list[Live]()
        live: dict[str, Live] = {}
        curve: list[int] = []
        for place, each in enumerate(order):
            if each.name in owners[each.name] and each.opcode not in _NO_MEMORY:
                own = sum(map(type_bytes_in_memory, _arrays(each)))
                if own and each.name not in kept:
                    live[each.name] = Live(own, each, each.name in reduced)
                    total += own
            inner, inner_live = self._inner(each)
            if total + inner > peak:
                peak, best = total + inner, [*live.values(), *inner_live]
            curve.append(total + inner)
            for owner in [o for o in live if last[o] == place]:
                total -= live.pop(owner).bytes
        return curve, best

    def _inner(self, each: Instruction) -> tuple[int, list[Live]]:
        """Returns what the computations that an instruction runs need at their peak."""
        if each.opcode not in ("while", "call", "conditional"):
            return 0, []
        names = [n.strip(" %") for m in _CALLED.finditer(each.rest) for n in m[1].split(",")]
        found = [self._walk(self._computations[n]) for n in names if n in self._computations]
        peaks = [(max(curve, default=0), live) for curve, live in found]
        return max(peaks, key=lambda pair: pair[0], default=(0, []))


def _arrays(each: Instruction) -> list[str]:
    """Returns the types of what a result is in: of one that is on its way, of where it goes."""
    arrays = [m[0] for m in _ARRAY.finditer(each.type)]
    if each.opcode in ("copy-start", "slice-start"):
        return arrays[:1]
    is_pair = each.opcode.endswith("-start") and each.opcode != "all-reduce-start"
    return arrays[len(each.operands) :] if is_pair else arrays


def _renames(each: Instruction) -> bool:
    return each.opcode in _RENAMES or each.opcode.endswith(("-done", "-update"))


def _owners(order: Sequence[Instruction]) -> dict[str, frozenset[str]]:
    """Returns, for each value, the values whose memory it is in."""
    owners: dict[str, frozenset[str]] = {}
    parts: dict[str, list[frozenset[str]]] = {}
    for each in order:
        given = each.operands
        of_operands = [owners.get(o, frozenset[str]()) for o in given]
        if each.opcode == "tuple":
            parts[each.name] = of_operands
        if each.opcode == "get-tuple-element" and given[0] in parts:
            index = re.search(r"index=(\d+)", each.rest)
            owners[each.name] = parts[given[0]][int(index[1]) if index else 0]
        elif _renames(each):
            first = of_operands[:1] if each.opcode == "dynamic-update-slice" else of_operands
            owners[each.name] = frozenset[str]().union(*first)
            if each.opcode == "while" and given[0] in parts:
                parts[each.name] = parts[given[0]]
        else:
            owners[each.name] = frozenset((each.name,))
    return owners


def shapes(hlo_type: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the arrays of a type."""
    dims = (m[2].split(",") for m in _ARRAY.finditer(hlo_type))
    return [tuple(int(n.strip("<= ")) for n in own if n) for own in dims]


def type_bytes_in_memory(hlo_type: str) -> int:
    """Returns the bytes of a value in the device's main memory, as it is laid out there.

    Tiles are filled up; what is in another memory (`S(1)` and so on) counts nothing.

    Example:
      >>> type_bytes_in_memory("f32[4,100]{1,0:T(8,128)}")
      4096
      >>> type_bytes_in_memory("(f32[256]{0:T(256)S(1)}, bf16[3])")
      6
    """
    return sum(_padded_bytes(*m.groups()) for m in _ARRAY.finditer(hlo_type))


def _padded_bytes(dtype: str, dims: str, layout: str | None) -> int:
    minor, _, rest = (layout or "").partition(":")
    if "S(" in rest:
        return 0
    tile = re.search(r"T\(([\d,]+)\)", rest)
    if tile is None or not dims:
        return array_bytes(dtype, dims)
    sizes = [int(d.strip("<= ")) for d in dims.split(",")]
    order = [int(i) for i in minor.split(",")] if minor else list(range(len(sizes)))[::-1]
    for axis, unit in zip(order, [int(n) for n in tile[1].split(",")][::-1], strict=False):
        sizes[axis] = math.ceil(sizes[axis] / unit) * unit
    return array_bytes(dtype, ",".join(map(str, sizes)))
