"""The compiler's numbers under the user's names: memory by cause, collectives, least times."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distjax._src.diagnostics.collectives import Collective, groups_of
from distjax._src.placement import Topology
from distjax._src.plan.arguments import Argument
from distjax._src.plan.report import CAUSES, PlannedCollective, PlannedMemory, PlannedVariable
from distjax._src.plan.schedule import Instruction, Live, Schedule, type_bytes_in_memory
from distjax._src.plan.topologies import Speeds, read_exhausted
from distjax._src.user_lines import UNKNOWN

# -- memory ---------------------------------------------------------------------


def read_memory(
    found: tuple[Any, Schedule | None] | None,
    arguments: Sequence[Argument],
    limit: int | None,
    refused: str | None,
) -> PlannedMemory:
    """Returns the memory of a compiled program, or of one that does not fit.

    Args:
      found: the compiler's `memory_analysis()`, and the program's schedule; None: it has refused.
      arguments: the step's arguments.
      limit: what programs may use.
      refused: what the compiler said.
    """
    if found is None:
        return _of_refused(arguments, limit, refused or "")
    stats, schedule = found
    total = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = total + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    variables: list[PlannedVariable] = []
    causes: dict[str, int] = dict.fromkeys(CAUSES, 0)
    if schedule is not None:
        variables = _variables(arguments, schedule)
        for variable in variables:
            causes[variable.cause] += variable.bytes_per_chip
        _add_results(causes, schedule, variables)
        _add_temporaries(causes, schedule, arguments, stats.temp_size_in_bytes)
    causes["code"] = stats.generated_code_size_in_bytes
    causes["unattributed"] = peak - sum(causes.values())
    return PlannedMemory(
        limit_bytes=limit,
        peak_bytes=peak,
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temp_bytes=stats.temp_size_in_bytes,
        by_cause=causes,
        by_variable=tuple(variables),
    )


def _of_refused(arguments: Sequence[Argument], limit: int | None, text: str) -> PlannedMemory:
    exhausted = read_exhausted(text)
    assert exhausted is not None
    needed, known_limit, only_temporaries = exhausted
    given = sum(a.bytes_per_chip for a in arguments)
    peak = needed + given if only_temporaries else max(needed, given)
    causes: dict[str, int] = dict.fromkeys(CAUSES, 0)
    for each in arguments:
        causes[each.cause] += each.bytes_per_chip
    causes["unattributed"] = peak - given
    variables = [_variable(each, each.bytes_per_chip, each.donated) for each in arguments]
    return PlannedMemory(
        limit_bytes=limit or known_limit,
        peak_bytes=peak,
        argument_bytes=given,
        output_bytes=0,
        alias_bytes=0,
        temp_bytes=peak - given,
        by_cause=causes,
        by_variable=tuple(sorted(variables, key=lambda v: -v.bytes_per_chip)),
    )


def _variable(each: Argument, own: int, donated: bool) -> PlannedVariable:
    return PlannedVariable(
        each.name, each.cause, each.shape, str(each.dtype), own, each.split, donated
    )


def _variables(arguments: Sequence[Argument], schedule: Schedule) -> list[PlannedVariable]:
    """Returns every argument; what the program does not use takes nothing."""
    taken = {i.scope: (number, i) for number, i in schedule.parameters().items()}
    donated = set(schedule.aliases().values())
    found = []
    for each in arguments:
        number, own = taken.get(each.path, (-1, None))
        size = 0 if own is None else type_bytes_in_memory(own.type)
        found.append(_variable(each, size, number in donated))
    return sorted(found, key=lambda v: -v.bytes_per_chip)


def _add_results(
    causes: dict[str, int], schedule: Schedule, variables: Sequence[PlannedVariable]
) -> None:
    """Adds the results that have memory of their own, each to the cause of a like argument."""
    free = collections.Counter(
        (v.bytes_per_chip, v.cause) for v in variables if not v.donated and v.cause != "batch"
    )
    aliased = schedule.aliases()
    for number, hlo_type in enumerate(schedule.results()):
        size = type_bytes_in_memory(hlo_type)
        if number in aliased or not size:
            continue
        cause = next((c for c in CAUSES if free[size, c] > 0), "state")
        free[size, cause] -= 1
        causes[cause] += size


def _add_temporaries(
    causes: dict[str, int], schedule: Schedule, arguments: Sequence[Argument], total: int
) -> None:
    """Adds what is alive at the peak, at most as much as the compiler says there is."""
    shapes = {_form(each.shape) for each in arguments if each.cause == "parameters"}
    shares = {"gradients": 0, "activations": 0}
    for live in schedule.at_peak:
        shares["gradients" if _is_gradient(live, shapes) else "activations"] += live.bytes
    scale = min(1.0, total / max(1, sum(shares.values())))
    for cause, size in shares.items():
        causes[cause] += int(size * scale)


def _is_gradient(live: Live, shapes: set[tuple[int, ...]]) -> bool:
    if live.is_reduced:
        return True
    return "transpose(" in live.scope and any(_form(s) in shapes for s in _shapes(live.type))


def _shapes(hlo_type: str) -> list[tuple[int, ...]]:
    return [
        tuple(int(n.strip("<= ")) for n in dims.split(",") if n)
        for dims in re.findall(r"[a-z]\w*\[([^\]]*)\]", hlo_type)
    ]


def _form(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape without its order and its ones, since compilers transpose."""
    return tuple(sorted(n for n in shape if n > 1))


# -- collectives ------------------------------------------------------------------

#: What hands on a value as it is, more or less.
_HANDS_ON = frozenset(
    "copy copy-start copy-done bitcast convert reshape transpose broadcast slice pad "
    "get-tuple-element dynamic-update-slice dynamic-slice fusion slice-start slice-done "
    "async-start async-done concatenate tuple optimization-barrier custom-call".split()
)


def planned_collectives(
    found: Sequence[tuple[Collective, tuple[str, int, str]]],
    schedule: Schedule,
    arguments: Sequence[Argument],
    topology: Topology,
    written: Sequence[Collective],
) -> tuple[list[PlannedCollective], list[tuple[float, str, int]]]:
    """Returns the collectives of a compiled program by cause, and their places in it.

    Args:
      found: each collective, with the kind, the bytes and the rest of its line.
      schedule: the program.
      arguments: the step's arguments.
      topology: the replicas.
      written: the collectives in the code.
    """
    placed = {each.name: (place, overlaps) for place, each, overlaps in schedule.collectives()}
    by_rest = {i.inside + ")" + i.rest: i for i in schedule.instructions if i.name in placed}
    names = {a.path: a for a in arguments}
    made = {i.name: i for i in schedule.instructions}
    kinds = collections.defaultdict(set)
    for each in written:
        kinds[each.source].add(each.kind)
    grouped: dict[PlannedCollective, list[PlannedCollective]] = {}
    places = []
    for collective, (kind, size, rest) in found:
        own = by_rest.get(rest)
        place, overlaps = placed[own.name] if own is not None else (None, False)
        if place is not None:
            places.append((place / max(1, len(schedule.instructions)), kind, size))
        sources = _sources(own, made, names) if own is not None else []
        if not sources and own is not None:
            sources = _like(own, arguments)
        each = PlannedCollective(
            kind,
            size,
            _axes(rest, topology),
            1,
            () if collective.source == UNKNOWN else (collective.source,),
            tuple(dict.fromkeys(a.name for a in sources)),
            _why(collective, kinds, own, bool(sources)),
            overlaps,
        )
        key = dataclasses.replace(each, bytes=0, variables=())
        grouped.setdefault(key, []).append(each)
    return [_together(key, those) for key, those in grouped.items()], places


def _together(key: PlannedCollective, those: Sequence[PlannedCollective]) -> PlannedCollective:
    variables = tuple(dict.fromkeys(name for c in those for name in c.variables))
    size = sum(c.bytes for c in those)
    return dataclasses.replace(key, bytes=size, count=len(those), variables=variables)


def _why(
    collective: Collective,
    written: Mapping[str, set[str]],
    own: Instruction | None,
    is_of_arguments: bool,
) -> str:
    """Returns what XLA made a collective for; "" if it is in the code as it is."""
    count = len(_shapes(own.type)) if own is not None else 1
    kinds = written.get(collective.source, set())
    if collective.kind in kinds:
        return f"{count} joined" if count > 1 else ""
    if collective.source != UNKNOWN and kinds:
        return f"in place of {' and '.join(sorted(kinds))}"
    if collective.kind == "all-reduce" and count > 1:
        return f"{count} joined"
    if is_of_arguments:
        gathers = collective.kind in ("all-gather", "all-reduce")
        return f"{'gathers' if gathers else 'moves'} what is split"
    scope = own.scope.rpartition("/")[2] if own is not None else ""
    return f"for {scope}" if scope else "moves what is split"


def _sources(
    own: Instruction, made: Mapping[str, Instruction], names: Mapping[str, Argument]
) -> list[Argument]:
    """Returns the arguments whose values go into a collective more or less as they are."""
    found, ahead, seen = [], [(o, 0) for o in own.operands], set()
    while ahead:
        name, depth = ahead.pop(0)
        each = made.get(name)
        if each is None or name in seen or depth > 8:
            continue
        seen.add(name)
        argument = names.get(each.scope) if each.opcode == "parameter" else None
        if argument is not None and argument.cause != "batch" and argument.shape:
            found.append(argument)
        is_simple = each.opcode != "fusion" or len(each.operands) <= 3
        if each.opcode in _HANDS_ON and is_simple:
            ahead += [(o, depth + 1) for o in each.operands]
    return found


def _like(own: Instruction, arguments: Sequence[Argument]) -> list[Argument]:
    """Returns the parameters of whose shape the results of a reduction are."""
    if not own.opcode.startswith(("all-reduce", "reduce-scatter")):
        return []
    free = collections.defaultdict(list)
    for each in arguments:
        if each.cause == "parameters":
            free[_form(each.shape)].append(each)
    return [free[_form(s)].pop(0) for s in _shapes(own.type) if _form(s) and free[_form(s)]]


def _axes(rest: str, topology: Topology) -> str:
    """Returns the names of the mesh axes that a collective goes over, "a,b"."""
    mesh = topology.mesh
    if mesh is None or mesh.size == 1:
        return ""
    ids = np.arange(mesh.size).reshape(tuple(mesh.shape.values()))
    group = _first_group(rest, mesh.size)
    names, sizes = list(mesh.shape), ids.shape
    moved = [
        name
        for i, name in enumerate(names)
        if sizes[i] > 1 and ids.take(1, axis=i).flat[0] in group
    ]
    return ",".join(moved) or "none"


def _first_group(rest: str, size: int) -> frozenset[int]:
    """Returns the devices with which device 0 exchanges; all of them if that is not told."""
    groups = groups_of(rest.partition("replica_groups=")[2], size) or ()
    return next((group for group in groups if 0 in group), frozenset(range(size)))


# -- times --------------------------------------------------------------------------


def seconds_at_least(
    costs: Mapping[str, float],
    collectives: Sequence[PlannedCollective],
    speeds: Speeds | None,
    num_replicas: int,
) -> dict[str, float | None]:
    """Returns the least time that compute, memory and links allow for a step.

    Counted work by published speeds; each byte that a collective returns crosses the links once.
    """
    if speeds is None or num_replicas < 1:
        return dict.fromkeys(("compute", "memory", "network", "step"))
    flops, moved = costs.get("flops", 0.0), costs.get("bytes accessed", 0.0)
    sent = sum(c.bytes for c in collectives)
    each = {
        "compute": max(flops, 0.0) / speeds.flops,
        "memory": max(moved, 0.0) / speeds.memory,
        "network": sent / speeds.links,
    }
    return {**each, "step": max(each.values())}
