"""An update cut by owner: what each server computes of it, and from what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distjax.errors import MergeError, message
from distjax.jax_compat import Var
from distjax.servers.cutting.code import Code, in_own_buffers
from distjax.servers.cutting.update import Update
from distjax.servers.server_storage import Part


@dataclass(frozen=True)
class ServerShare:
    """One server's share of an update.

    Attributes:
      server: its number.
      code: (*takes, *operands) -> (*new values of `writes`, *answers).
      takes: parts of variables whose values it reads or replaces.
      writes: those that it replaces.
      operands: names of what the worker sends it.
      answers: names of what it sends back.
    """

    server: int
    code: Code
    takes: tuple[Part, ...]
    writes: tuple[Part, ...]
    operands: tuple[Var, ...]
    answers: tuple[Var, ...]


def results_by_server(update: Update, num_servers: int) -> dict[int, list[int]]:
    """Returns the numbers of the results that each server computes.

    A part is written where it lives; an answer is computed where the variables that it reads live.

    Args:
      update: the update.
      num_servers: how many servers there are.
    """
    numbers: dict[int, list[int]] = {k: [] for k in range(num_servers)}
    for number, part in enumerate(update.written):
        for server in numbers if part.server is None else (part.server,):
            numbers[server].append(number)
    for number in range(len(update.written), len(update.written) + len(update.answers)):
        numbers[_answers_at(update, number, num_servers)].append(number)
    return {k: v for k, v in numbers.items() if v}


def _answers_at(update: Update, number: int, num_servers: int) -> int:
    if num_servers == 1:
        return 0
    return _first_server(_parts_used(update, [number]) or update.parts, 0)


def _first_server(parts: Iterable[Part], default: int) -> int:
    return min((part.server for part in parts if part.server is not None), default=default)


def _effects_by_server(
    update: Update, name: str, results: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Returns the numbers of the equations with effects, such as callbacks, that each server runs.

    Each runs once: where its value is used, else where a variable that it reads lives.

    Args:
      update: the update.
      name: the user's name of the step.
      results: the numbers of the results that each server computes.
    """
    found: dict[int, list[int]] = {}
    needed = {server: update.code.needed(numbers, ()) for server, numbers in results.items()}
    for number, eqn in enumerate(update.code.jaxpr.eqns):
        if not eqn.effects:
            continue
        servers = [server for server in needed if number in needed[server]]
        if len(servers) > 1:
            raise MergeError(_shared_effect_text(name, servers))
        read = _parts_used(update, (), [number])
        servers = servers or [_first_server(read, min(results, default=0))]
        found.setdefault(servers[0], []).append(number)
    return found


def _parts_used(
    update: Update, results: Sequence[int], effects: Collection[int] = ()
) -> list[Part]:
    used = update.code.cut_to(results, effects).used
    return [part for part, is_used in zip(update.parts, used, strict=False) if is_used]


def cut_by_owner(update: Update, name: str, num_servers: int) -> list[ServerShare]:
    """Returns the share of each server that takes part in an update.

    Args:
      update: the update.
      name: the user's name of the step.
      num_servers: how many servers there are.

    Raises:
      MergeError: a server would need another one's variable, or several the value of a callback.
    """
    results = results_by_server(update, num_servers)
    effects = _effects_by_server(update, name, results)
    shares: list[ServerShare] = []
    for server in sorted({*results, *effects}):
        own = results.get(server, []), effects.get(server, [])
        shares.append(_share(update, server, *own))
        if _foreign(shares[-1].takes, server):
            raise MergeError(_foreign_text(update, name, server, *own))
    return shares


def _foreign(parts: Sequence[Part], server: int) -> list[Part]:
    """Returns the parts that `server` does not have."""
    return [part for part in parts if part.server not in (None, server)]


def _share(
    update: Update, server: int, numbers: Sequence[int], effects: Sequence[int]
) -> ServerShare:
    code = update.code.cut_to(numbers, effects)
    results: list[Any] = [*update.written, *update.answers]
    writes = tuple(results[i] for i in numbers if i < len(update.written))
    names: list[Any] = [*update.parts, *update.operands]
    taken = [i for i, used in enumerate(code.used) if used or names[i] in writes]
    return ServerShare(
        server=server,
        code=in_own_buffers(code.taking(taken)),
        takes=tuple(names[i] for i in taken if i < len(update.parts)),
        writes=writes,
        operands=tuple(names[i] for i in taken if i >= len(update.parts)),
        answers=tuple(results[i] for i in numbers if i >= len(update.written)),
    )


def _shared_effect_text(name: str, servers: Sequence[int]) -> str:
    return message(
        f"{name} needs callbacks in merges whose value one server uses",
        got=f"one whose value servers {' and '.join(map(str, servers))} use",
        why="each of them would call it, and servers do not talk to each other",
        fix="call it in the step, and pass what it returns: ctx.merge_call(fn, args=(value,))",
    )


def _foreign_text(
    update: Update, name: str, server: int, results: Sequence[int], effects: Sequence[int]
) -> str:
    written = [i for i in results if i < len(update.written)]
    wrong = [i for i in written if _foreign(_parts_used(update, [i]), server)]
    what = f"variable {update.written[wrong[0]].name!r}" if wrong else "a callback of its merge"
    used = _parts_used(update, wrong[:1]) if wrong else _parts_used(update, results, effects)
    foreign = _foreign(used, server)
    lives = ", ".join(f"{part.name!r} {part.lives}" for part in foreign[:3])
    lives += f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    other, whole = foreign[0].variable, ""
    if any(part.is_shard for part in foreign):
        whole = "; or leave variables whole: partitioner=lambda shape, dtype: [1] * len(shape)"
    fix = f"{_ONE_SERVER}, where all variables live together{whole}"
    if other.isidentifier():  # not a slot or an accumulator, such as w/accumulator
        fix = (
            f"pass the worker's value of it: ctx.merge_call(fn, args=({other}.value,)); or make "
            f"them live together: with strategy.extended.colocate_vars_with({other}): ...; or "
            f"{_ONE_SERVER}{whole}"
        )
    return message(
        f"{name} needs merges whose variables live at one server",
        got=f"{what}, computed at server {server}, from variables {lives}",
        why="servers do not talk to each other: each updates what it has, from what a worker "
        "sends; a shard of a partitioned variable from its own rows",
        fix=fix,
    )


_ONE_SERVER = "dj.ParameterServerStrategy(servers=1)"
