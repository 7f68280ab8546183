"""Plan: a step, cut into what workers run and what servers run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from distjax.jax_compat import ShapedArray
from distjax.variables.storage import StoredArray


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A pure function of flat arrays, jitted by who runs it.

    Attributes:
      name: what it is called in error texts.
      fn: (*arrays) -> tuple of arrays.
      avals: of the arrays; not needed where it is run in this process.
    """

    name: str
    fn: Callable[..., tuple[jax.Array, ...]]
    avals: tuple[ShapedArray, ...] = ()


@dataclasses.dataclass(frozen=True)
class Push:
    """What one stage sends to one server, and what comes back.

    Attributes:
      server: its number.
      operands: slots of the worker that travel there.
      takes: keys of variables at this server that the program reads.
      writes: those it gives new values; a subset of `takes`.
      answers: slots of the worker that its answer fills.
      program: (*takes, *operands) -> (*new values of writes, *answers).
    """

    server: int
    operands: tuple[int, ...]
    takes: tuple[str, ...]
    writes: tuple[str, ...]
    answers: tuple[int, ...]
    program: Program


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the step at the worker, and the pushes that follow it.

    Attributes:
      operands: slots that the program reads.
      results: slots that it fills.
      program: (*operands) -> (*results).
      pushes: independent of each other, so they are sent in parallel.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    program: Program
    pushes: tuple[Push, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A step, cut: a machine of numbered slots at the worker.

    Attributes:
      name: the step's.
      arguments: slots of the flat arguments.
      pulls: (slot, key of a variable): the snapshot.
      stages: in order.
      results: slots of the flat results.
      rebuild: flat results -> what the user's function returned.
      owners: key of every variable used -> the number of its server.
      is_read_only: whether no push writes.
      kept: what servers know of variables, which they keep as long as it lives.
    """

    name: str
    arguments: tuple[int, ...]
    pulls: tuple[tuple[int, str], ...]
    stages: tuple[Stage, ...]
    results: tuple[int, ...]
    rebuild: Callable[[Sequence[jax.Array]], Any]
    owners: Mapping[str, int]
    is_read_only: bool
    kept: tuple[StoredArray, ...] = ()


def writes(stage: Stage) -> bool:
    """Returns whether a push of a stage writes."""
    return any(push.writes for push in stage.pushes)


def count_writes(plan: Plan) -> int:
    """Returns the number of stages that write."""
    return sum(map(writes, plan.stages))
