"""The compiler's numbers under the user's names: arguments, memory by cause, collectives, times.

A program takes the variables that it writes, those that it reads, what keyword arguments and
captured objects hold, and the user's arguments; the compiler names each by its path in that tree.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.tree_util import keystr, tree_leaves_with_path

from distjax._src import jax_compat
from distjax._src.diagnostics.collectives import Collective
from distjax._src.diagnostics.explain_step import Notes
from distjax._src.objects.stateful import ObjectKeywords, is_placeholder
from distjax._src.placement.per_replica import PerReplica
from distjax._src.placement.topology import is_host_memory
from distjax._src.plan.report import CAUSES, Record
from distjax._src.plan.schedule import Instruction, Live, Schedule, shapes, type_bytes_in_memory
from distjax._src.plan.topologies import Speeds, read_exhausted
from distjax._src.program.jit import LoweredProgram
from distjax._src.replica.arguments import positional_names, user_path
from distjax._src.strategies.inspection import kind_of
from distjax._src.typing import PyTree
from distjax._src.user_lines import UNKNOWN
from distjax._src.variables.layouts import Layout, MirroredLayout

# -- arguments ---------------------------------------------------------------------


#: The arrays that a step takes, by their paths in the compiler's text: what a report says of each.
#: The bytes are without padding, 0 in host memory.
Arguments = Mapping[str, Record]
#: Where those are that a strategy decides about: variables, and parts of modules.
KEPT = re.compile(r"(written|read)\[|.*\.<state ")
#: How JAX spells the only array of a node of ours, here and in the compiler's text.
_INDEX = re.compile(r"\[<flat index (\d+)>\]")


def arguments_of(
    lowered: LoweredProgram, notes: Notes, fn: Callable[..., Any], args: Sequence[PyTree]
) -> Arguments:
    """Returns the arguments of a lowered step; the trace of `fn` of `args` has left the notes."""
    writes = list(notes.writes)
    variables = writes, [v for v in notes.reads if v not in set(writes)]
    owners = {v.name for v in (*variables[0], *variables[1]) if v.trainable}
    operands = lowered.args_info[0]
    objects = _arrays_of_objects(jax.tree.structure(operands[2], is_leaf=is_placeholder))
    given = _given(args, positional_names(fn))
    found: dict[str, Record] = {}
    seen: collections.Counter[str] = collections.Counter()
    for path, info in tree_leaves_with_path(operands, is_leaf=is_placeholder):
        index = path[0].idx
        first = ("written", "read", "kwargs")[index] if index < 3 else f"args[{index - 3}]"
        where = first + _INDEX.sub(r"[\1]", keystr(path[1:]))
        if is_placeholder(info):
            own = zip(info.leaves, objects.get(info.index, []), strict=False)
            for i, (leaf, known) in enumerate(own):
                found[f"{where}.<state {i}>"] = _told(leaf, *known)
        elif index < 2:
            variable = variables[index][path[1].idx]
            seen[variable.name] += 1  # those without a name of their own are numbered
            number = f" ({seen[variable.name]})" if seen[variable.name] > 1 else ""
            is_slot = not variable.trainable and variable.name.rpartition("/")[0] in owners
            cause = "optimizer" if is_slot else kind_of(variable.name, variable.trainable)
            name, layout = variable.name + number, variable.layout
            found[where] = _told(info, name, cause, variable.sharding, layout)
        else:
            place = f"[0][{index - 3}]" if index > 2 else "[1]"
            own_path = place + keystr(path[1:])
            found[where] = _told(info, *given.get(own_path, (own_path, "state", None)))
    return found


def _told(
    info: PyTree, name: str, cause: str, sharding: Sharding | None, layout: Layout | None = None
) -> Record:
    aval = info._aval if hasattr(info, "_aval") else info  # as of JAX 0.10, and as of 0.12
    why = layout.why if isinstance(layout, MirroredLayout) else ""
    shape = tuple(aval.shape)
    own = shape if sharding is None else sharding.shard_shape(shape)
    is_host = sharding is not None and is_host_memory(sharding)
    parts = ["host memory"] if is_host else []
    pairs = enumerate(zip(shape, own, strict=True))
    parts += [f"axis {i} by {n // m}" for i, (n, m) in pairs if m and n != m]
    size = 0 if is_host else math.prod(own) * aval.dtype.itemsize
    found = Record(name=name, cause=cause, shape=shape, dtype=str(aval.dtype), bytes_per_chip=size)
    return Record(found, split=", ".join(parts), why=why, donated=bool(info.donated))


def _arrays_of_objects(treedef: jax.tree_util.PyTreeDef) -> dict[int, list[tuple[Any, ...]]]:
    """Returns what to tell of each array of each object, by the number of the object."""
    found: dict[int, list[tuple[Any, ...]]] = collections.defaultdict(list)
    node = treedef.node_data()
    if node is not None and node[0] is ObjectKeywords:
        plan = node[1][1]
        pairs = ((entry, layout) for entry in plan.entries for layout in entry.layouts)
        for owner, (entry, layout) in zip(plan.owners, pairs, strict=True):
            cause = kind_of(entry.path, entry.kind in ("Param", "LoRAParam"))
            sharding = None if layout is None else layout.sharding
            found[owner].append((entry.path, cause, sharding, layout))
    return found


def _given(args: Sequence[PyTree], names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Returns what to tell of each array among positional arguments, by path."""
    found: dict[str, tuple[Any, ...]] = {}
    is_optax = lambda x: type(x).__module__.split(".")[0] == "optax"
    is_one = lambda x: isinstance(x, PerReplica) or is_optax(x)
    for path, leaf in tree_leaves_with_path((tuple(args),), is_leaf=is_one):
        for inner, array in tree_leaves_with_path(leaf):
            own_path = keystr((*path, *inner))
            name = _INDEX.sub("", user_path(own_path, names))
            is_float = jax.numpy.issubdtype(getattr(array, "dtype", np.int32), np.inexact)
            cause = kind_of(name, bool(np.ndim(array) and is_float))
            cause = "optimizer" if is_optax(leaf) else cause
            cause = "batch" if isinstance(leaf, PerReplica) else cause
            found[own_path] = name, cause, getattr(array, "sharding", None)
    return found


# -- memory ------------------------------------------------------------------------


def total_of(stats: PyTree) -> dict[str, int]:
    """Returns the sums in the compiler's `memory_analysis()`, as a report names them."""
    given, out = stats.argument_size_in_bytes, stats.output_size_in_bytes
    alias, temporaries = stats.alias_size_in_bytes, jax_compat.temporary_bytes(stats)
    return {
        "peak_bytes": given + out - alias + temporaries + stats.generated_code_size_in_bytes,
        "argument_bytes": given,
        "output_bytes": out,
        "alias_bytes": alias,
        "temp_bytes": temporaries,
    }


def read_memory(
    stats: PyTree, schedule: Schedule, arguments: Arguments, limit: int | None
) -> Record:
    """Returns the memory of a compiled program: the peak by cause, and every argument.

    The compiler's `memory_analysis()` has the sums. What the program does not use takes nothing.
    """
    taken = {i.scope: (number, i.type) for number, i in schedule.parameters().items()}
    donated = set(schedule.aliases.values())
    variables: list[Record] = []
    for path, each in arguments.items():
        number, own_type = taken.get(path, (-1, ""))
        own = {"bytes_per_chip": type_bytes_in_memory(own_type), "donated": number in donated}
        variables.append(Record(each | own))
    total = total_of(stats)
    causes = _causes(variables)
    # A result that has memory of its own counts to the cause of a like argument.
    kept = [v for v in variables if not v.donated and v.cause != "batch"]
    free = collections.Counter((v.bytes_per_chip, v.cause) for v in kept)
    for number, hlo_type in enumerate(schedule.results()):
        size = 0 if number in schedule.aliases else type_bytes_in_memory(hlo_type)
        cause = next((c for c in CAUSES if free[size, c] > 0), "state")
        free[size, cause] -= 1
        causes[cause] += size
    # What is alive at the peak counts, at most as much as the compiler says there is.
    parameters = {_form(v.shape) for v in variables if v.cause == "parameters"}
    live = [(_is_gradient(each, parameters), each.bytes) for each in schedule.at_peak]
    scale = min(1.0, total["temp_bytes"] / max(1, sum(size for _, size in live)))
    for is_gradient, size in live:
        causes["gradients" if is_gradient else "activations"] += int(size * scale)
    causes["code"] = stats.generated_code_size_in_bytes
    return _memory(total, limit, causes, variables)


def memory_of_refused(arguments: Arguments, limit: int | None, text: str) -> Record:
    """Returns the memory of a program that does not fit, by what the compiler said of it."""
    exhausted = read_exhausted(text)
    assert exhausted is not None
    needed, known_limit, only_temporaries = exhausted
    variables = [*arguments.values()]
    given = sum(v.bytes_per_chip for v in variables)
    peak = needed + given if only_temporaries else max(needed, given)
    total = {"peak_bytes": peak, "argument_bytes": given, "output_bytes": 0, "alias_bytes": 0}
    total |= {"temp_bytes": peak - given}
    return _memory(total, limit or known_limit, _causes(variables), variables)


def _causes(variables: Sequence[Record]) -> dict[str, int]:
    causes = dict.fromkeys(CAUSES, 0)
    for each in variables:
        causes[each.cause] += each.bytes_per_chip
    return causes


def _memory(
    total: dict[str, int], limit: int | None, causes: dict[str, int], variables: Sequence[Record]
) -> Record:
    causes["unattributed"] = total["peak_bytes"] - sum(causes.values())
    ordered = sorted(variables, key=lambda v: -v.bytes_per_chip)
    return Record(limit_bytes=limit, **total, by_cause=causes, by_variable=ordered)


def _is_gradient(live: Live, parameters: set[tuple[int, ...]]) -> bool:
    if live.is_reduced:
        return True
    is_backward = "transpose(" in live.made_by.scope
    return is_backward and any(_form(s) in parameters for s in shapes(live.made_by.type))


def _form(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a shape without its order and its ones, since compilers transpose."""
    return tuple(sorted(n for n in shape if n > 1))


# -- collectives -------------------------------------------------------------------

#: What hands on a value as it is, more or less.
_HANDS_ON = frozenset(
    "copy copy-start copy-done bitcast convert reshape transpose broadcast slice pad "
    "get-tuple-element dynamic-update-slice dynamic-slice fusion slice-start slice-done "
    "async-start async-done concatenate tuple optimization-barrier custom-call".split()
)


def planned_collectives(
    compiled: Sequence[Collective],
    written: Sequence[Collective],
    schedule: Schedule,
    arguments: Arguments,
) -> tuple[list[Record], list[tuple[float, str, int]]]:
    """Returns the collectives of a program by cause, and the place, kind and bytes of each.

    Those that are compiled are in the order of its text.
    """
    kinds: dict[str, set[str]] = collections.defaultdict(set)
    for each in written:
        kinds[each.source].add(each.kind)
    told: list[Record] = []
    places: list[tuple[float, str, int]] = []
    for each, (own, place, overlaps) in zip(compiled, schedule.collectives(), strict=True):
        if place is not None:
            places.append((place, each.kind, each.result_bytes))
        sources = _sources(own, schedule.everywhere, arguments)
        variables = list(dict.fromkeys(a.name for a in sources))
        why = _why(each, kinds.get(each.source, set()), own, bool(variables))
        told.append(told_of(each, variables, why, overlaps))
    return together(told), places


def told_of(
    each: Collective, variables: Sequence[str] = (), why: str = "", overlaps: bool = False
) -> Record:
    """Returns what a report says of a collective."""
    found = Record(kind=each.kind, bytes=each.result_bytes, axis=each.over, count=1)
    lines = [] if each.source == UNKNOWN else [each.source]
    return Record(found, lines=lines, variables=[*variables], made_by_xla=why, overlaps=overlaps)


def together(collectives: Sequence[Record]) -> list[Record]:
    """Returns collectives of one kind, axis, line and cause as one, with their number."""
    found: dict[tuple[Any, ...], Record] = {}
    for each in collectives:
        key = (each.kind, each.axis, *each.lines, each.made_by_xla, each.overlaps)
        if key in found:
            one = found[key]
            variables = list(dict.fromkeys([*one.variables, *each.variables]))
            count, size = one.count + 1, one.bytes + each.bytes
            one.update(variables=variables, count=count, bytes=size)
        else:
            found[key] = each
    return [*found.values()]


def _why(each: Collective, written: set[str], own: Instruction, is_of_arguments: bool) -> str:
    """Returns what XLA made a collective for; "" if it is in the code as it is."""
    count = len(shapes(own.type))
    if each.kind in written:
        return f"{count} joined" if count > 1 else ""
    if each.over.startswith("part of "):
        return "a stage of one over more devices"
    if each.source != UNKNOWN and written:
        return f"in place of {' and '.join(sorted(written))}"
    if each.kind == "all-reduce" and count > 1:
        return f"{count} joined"
    if is_of_arguments:
        gathers = each.kind in ("all-gather", "all-reduce")
        return f"{'gathers' if gathers else 'moves'} what is split"
    scope = own.scope.rpartition("/")[2]
    return f"for {scope}" if scope else "moves what is split"


def _sources(
    own: Instruction, made: Mapping[str, Instruction], arguments: Arguments
) -> Iterator[Record]:
    """Yields the arguments whose values go into a collective more or less as they are."""
    ahead, seen = [(o, 0) for o in own.operands], set[str]()
    while ahead:
        name, depth = ahead.pop(0)
        each = made.get(name)
        if each is None or name in seen or depth > 8:
            continue
        seen.add(name)
        argument = arguments.get(each.scope) if each.opcode == "parameter" else None
        if argument is not None and argument.cause != "batch" and argument.shape:
            yield argument
        if each.opcode in _HANDS_ON and (each.opcode != "fusion" or len(each.operands) <= 3):
            ahead += [(o, depth + 1) for o in each.operands]


# -- times -------------------------------------------------------------------------


def seconds_at_least(
    costs: Mapping[str, float], collectives: Sequence[Record], speeds: Speeds | None
) -> dict[str, float | None]:
    """Returns the least time that compute, memory and links allow for a step.

    Counted work by published speeds; each byte that a collective returns crosses the links once.
    """
    if speeds is None:
        return dict.fromkeys(("compute", "memory", "network", "step"))
    each = {
        "compute": max(costs.get("flops", 0.0), 0.0) / speeds.flops,
        "memory": max(costs.get("bytes accessed", 0.0), 0.0) / speeds.memory,
        "network": sum(c.bytes for c in collectives) / speeds.links,
    }
    return {**each, "step": max(each.values())}
