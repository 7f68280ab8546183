"""What a compiled program holds in memory while it runs: liveness over its scheduled HLO.

The compiler says how many bytes of temporaries a program needs, but not what they are. Its text is
in the order of execution, so which values are alive at once can be read from it: from where a value
is computed to its last use. A value that only renames another (a tuple, a bitcast, the end of an
asynchronous copy, the carry of a loop) has no memory of its own, and neither has one that becomes a
result. What the compiler needs beyond the sum (gaps, alignment, scratch space) stays unattributed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

from distjax._src.diagnostics.collectives import KINDS, array_bytes

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_START = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|\w+_computations?)=\{?%?([\w.\-%, ]+)")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](?:\{([^}]*)\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+)")

#: What computes no value of its own.
_RENAMES = frozenset(
    "bitcast get-tuple-element tuple optimization-barrier while copy-done "
    "all-gather-done all-reduce-done collective-permute-done async-done async-update "
    "slice-done dynamic-update-slice add-dependency".split()
)
_WORK = frozenset("fusion convolution dot custom-call while call scatter gather sort".split())


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: its name.
      type: the HLO type of its result, with the layout.
      opcode: what it does.
      operands: the names of its operands.
      inside: the text of its operands; of a parameter, its number.
      rest: the attributes behind them.
      is_root: whether it is the result of its computation.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    inside: str
    rest: str
    is_root: bool

    @property
    def scope(self) -> str:
        """The scopes that it was staged in, "a/b/c"."""
        found = _OP_NAME.search(self.rest)
        return found[1].replace("\\'", "'") if found else ""


@dataclasses.dataclass(frozen=True)
class Live:
    """One value in memory.

    Attributes:
      bytes: its size, as laid out.
      type: its HLO type.
      scope: the scopes that it was staged in.
      is_reduced: whether it goes into a reduction over devices, or comes from one.
    """

    bytes: int
    type: str
    scope: str
    is_reduced: bool


class Schedule:
    """A compiled program, read from its text.

    Args:
      hlo_text: the text of a scheduled module, as from `compiled.as_text()`.
    """

    def __init__(self, hlo_text: str):
        self._computations, self._entry = _computations(hlo_text)
        self._head = hlo_text.partition("\n")[0]

    @property
    def instructions(self) -> list[Instruction]:
        """Those of the program itself, in the order of execution."""
        return self._computations.get(self._entry, [])

    @functools.cached_property
    def _lives(self) -> tuple[list[int], list[Live]]:
        return self._walk(self._entry)

    @property
    def live_bytes(self) -> list[int]:
        """The bytes of temporaries that are alive at each instruction."""
        return self._lives[0]

    @property
    def at_peak(self) -> list[Live]:
        """The temporaries that are alive where most are."""
        return self._lives[1]

    def aliases(self) -> dict[int, int]:
        """Maps the results that reuse the memory of an argument to its number."""
        part = self._head.partition("input_output_alias={")[2].partition("entry_computation")[0]
        return {int(i.split(",")[0] or 0): int(number) for i, number in _ALIAS.findall(part)}

    def parameters(self) -> dict[int, Instruction]:
        """The arguments, by number; what the program does not use is not among them."""
        found = (i for i in self.instructions if i.opcode == "parameter")
        return {int(i.inside): i for i in found}

    def results(self) -> list[str]:
        """The types of the results."""
        root = next((i for i in self.instructions if i.is_root), None)
        return [] if root is None else [m[0] for m in _ARRAY.finditer(root.type)]

    @functools.cached_property
    def has_loops(self) -> bool:
        """Whether any computation loops: the compiler counts the work of a loop once."""
        return any(i.opcode == "while" for c in self._computations.values() for i in c)

    def collectives(self) -> Iterator[tuple[int, Instruction, bool]]:
        """Yields each collective: its place, itself, and whether other work runs meanwhile."""
        started: dict[str, int] = {}
        for place, each in enumerate(self.instructions):
            kind = each.opcode.removesuffix("-start").removesuffix("-done")
            if kind not in KINDS:
                continue
            if each.opcode.endswith("-start"):
                started[each.name] = place
                continue
            since = min((started[o] for o in each.operands if o in started), default=place)
            between = self.instructions[since + 1 : place]
            yield place, each, any(i.opcode in _WORK for i in between)

    def _walk(self, name: str) -> tuple[list[int], list[Live]]:
        """Returns the bytes that are alive at each instruction, and the values at the peak."""
        order = self._computations.get(name, [])
        owners = _owners(order)
        last: dict[str, int] = {}
        pending: dict[str, tuple[str, ...]] = {}
        for place, each in enumerate(order):
            if each.opcode.endswith("-start"):
                pending[each.name] = each.operands
            read = [o for start in each.operands for o in pending.get(start, ())]
            for operand in (each.name, *each.operands, *read):
                for owner in owners.get(operand, ()):
                    last[owner] = place
        kept = {o for i in order if i.is_root for o in owners.get(i.name, ())}
        reduced = _reduced(order, owners)
        total, peak, best = 0, -1, []
        live: dict[str, Live] = {}
        curve = []
        for place, each in enumerate(order):
            if each.name in owners.get(each.name, ()) and each.opcode not in _NO_MEMORY:
                own = _own_bytes(each)
                if own and each.name not in kept:
                    live[each.name] = Live(own, each.type, each.scope, each.name in reduced)
                    total += own
            inner, inner_live = self._inner(each)
            if total + inner > peak:
                peak, best = total + inner, [*live.values(), *inner_live]
            curve.append(total + inner)
            for owner in (o for o in [*live] if last[o] == place):
                total -= live.pop(owner).bytes
        return curve, best

    def _inner(self, each: Instruction) -> tuple[int, list[Live]]:
        """Returns what the computations that an instruction runs need at their peak."""
        if each.opcode not in ("while", "call", "conditional"):
            return 0, []
        names = [n.strip(" %") for m in _CALLED.finditer(each.rest) for n in m[1].split(",")]
        found = [self._walk(n) for n in names if n in self._computations]
        best = max(found, key=lambda each: max(each[0], default=0), default=([], []))
        return max(best[0], default=0), best[1]


#: What needs no memory that the program allocates.
_NO_MEMORY = frozenset("parameter constant iota partition-id replica-id after-all".split())


def _own_bytes(each: Instruction) -> int:
    """Returns the bytes of a result: of one that is on its way, of where it goes."""
    arrays = [m[0] for m in _ARRAY.finditer(each.type)]
    if each.opcode in ("copy-start", "slice-start"):
        arrays = arrays[:1]
    elif each.opcode.endswith("-start") and each.opcode != "all-reduce-start":
        arrays = arrays[len(each.operands) :]
    return sum(map(type_bytes_in_memory, arrays))


def _computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Returns the computations of a module by name, and the name of the entry."""
    found: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _HEAD.match(line)
            if head:
                current = found.setdefault(head[2], [])
                entry = head[2] if head[1] else entry
        elif current is not None and (start := _START.match(line)):
            current.append(_instruction(start, line[start.end() :]))
    return found, entry


def _instruction(start: re.Match[str], text: str) -> Instruction:
    size = _closing(text) if text.startswith("(") else text.index(" ")
    opcode, _, rest = text[size + 1 :].partition("(")
    end = _closing("(" + rest) - 2
    operands = tuple(_NAME.findall(rest[:end])) if opcode != "constant" else ()
    return Instruction(
        start[2], text[:size], opcode, operands, rest[:end], rest[end + 1 :], bool(start[1])
    )


def _closing(text: str) -> int:
    """Returns the length of the parenthesis that a text begins with."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def _owners(order: Sequence[Instruction]) -> dict[str, frozenset[str]]:
    """Returns, for each value, the values whose memory it is in."""
    owners: dict[str, frozenset[str]] = {}
    parts: dict[str, tuple[frozenset[str], ...]] = {}
    for each in order:
        of_operands = [owners.get(o, frozenset()) for o in each.operands]
        if each.opcode == "tuple":
            parts[each.name] = tuple(of_operands)
        if each.opcode == "get-tuple-element" and each.operands[0] in parts:
            index = re.search(r"index=(\d+)", each.rest)
            owners[each.name] = parts[each.operands[0]][int(index[1]) if index else 0]
        elif each.opcode == "dynamic-update-slice":
            owners[each.name] = of_operands[0]
        elif each.opcode in _RENAMES or each.opcode.endswith(("-done", "-update")):
            owners[each.name] = frozenset().union(*of_operands)
            if each.opcode == "while" and each.operands[0] in parts:
                parts[each.name] = parts[each.operands[0]]
        else:
            owners[each.name] = frozenset((each.name,))
    return owners


def _reduced(order: Sequence[Instruction], owners: dict[str, frozenset[str]]) -> set[str]:
    """Returns the values that go into a reduction over devices, or come from one."""
    found: set[str] = set()
    for each in order:
        if each.opcode.startswith(("all-reduce", "reduce-scatter")):
            for name in (each.name, *each.operands):
                found.update(owners.get(name, ()))
    return found


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
    tile = _TILE.search(rest)
    if tile is None or not dims:
        return array_bytes(dtype, dims)
    sizes = [int(d.strip("<= ")) for d in dims.split(",")]
    order = [int(i) for i in minor.split(",")] if minor else list(range(len(sizes)))[::-1]
    for axis, unit in zip(order, [int(n) for n in tile[1].split(",")][::-1], strict=False):
        sizes[axis] = math.ceil(sizes[axis] / unit) * unit
    return array_bytes(dtype, ",".join(map(str, sizes)))
