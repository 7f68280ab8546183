"""An update cut by owner: for each server what it computes of it, and from what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distjax.errors import MergeError, message
from distjax.jax_compat import Var
from distjax.servers.code import Code
from distjax.servers.placement import server_of
from distjax.servers.update import Update
from distjax.variables.variable import Variable


@dataclass(frozen=True)
class ServerShare:
    """What one server does of an update.

    Attributes:
      server: its number.
      code: (*takes, *operands) -> (*new values of `writes`, *answers).
      takes: variables whose values it reads or replaces.
      writes: those that it replaces.
      operands: what it needs of the worker.
      answers: what the worker needs of it.
    """

    server: int
    code: Code
    takes: tuple[Variable, ...]
    writes: tuple[Variable, ...]
    operands: tuple[Var, ...]
    answers: tuple[Var, ...]


def cut_by_owner(update: Update, name: str, num_servers: int) -> list[ServerShare]:
    """Returns the share of each server that an update concerns.

    Args:
      update: the update.
      name: the user's name of the step.
      num_servers: how many servers there are; each keeps variables that belong to no other.

    Raises:
      MergeError: one server would need a variable of another one.
    """
    results = [*update.written, *update.answers]
    servers: dict[int, list[int]] = {}
    for number, result in enumerate(results):
        for server in _servers_of(update, number, result, name, num_servers):
            servers.setdefault(server, []).append(number)
    return [_share(update, k, results, servers[k]) for k in sorted(servers)]


def _servers_of(
    update: Update, number: int, result: Variable | Var, name: str, num_servers: int
) -> Sequence[int]:
    """Returns the servers that compute a result."""
    used = update.code.cut_to([number]).used
    read = [v for v, is_used in zip(update.variables, used, strict=False) if is_used]
    owners = {k: v for v in read if (k := server_of(v)) is not None}
    if isinstance(result, Variable):
        own = server_of(result)
        servers = range(num_servers) if own is None else (own,)
        foreign = [v for k, v in owners.items() if tuple(servers) != (k,)]
        if foreign:
            raise MergeError(_foreign_text(name, f"variable {result.name!r}", own, foreign))
        return servers
    if len(owners) > 1:
        raise MergeError(_foreign_text(name, "a result of its merge", None, list(owners.values())))
    return [*owners][:1] or [min(server_of(v) or 0 for v in update.variables)]


def _share(
    update: Update, server: int, results: Sequence[Variable | Var], numbers: Sequence[int]
) -> ServerShare:
    code = update.code.cut_to(numbers)
    chosen = [results[i] for i in numbers]
    writes = tuple(r for r in chosen if isinstance(r, Variable))
    names: list[Any] = [*update.variables, *update.operands]
    taken = [i for i, used in enumerate(code.used) if used or names[i] in writes]
    num_variables = len(update.variables)
    return ServerShare(
        server=server,
        code=code.taking(taken),
        takes=tuple(update.variables[i] for i in taken if i < num_variables),
        writes=writes,
        operands=tuple(names[i] for i in taken if i >= num_variables),
        answers=tuple(r for r in chosen if not isinstance(r, Variable)),
    )


def _foreign_text(name: str, what: str, server: int | None, foreign: Sequence[Variable]) -> str:
    where = "every server" if server is None else f"server {server}"
    lives = ", ".join(f"{v.name!r} at server {server_of(v)}" for v in foreign)
    others = foreign[0].name
    return message(
        f"{name} needs merges whose variables live at one server",
        got=f"{what}, computed at {where}, from variables {lives}",
        why="servers do not talk to each other: each updates what it has, from what a worker sends",
        fix=f"pass the worker's value of it: ctx.merge_call(fn, args=({others}.value,)); or make "
        f"them live together: with strategy.extended.colocate_vars_with({others}): ...",
    )
