"""StepPlan: a step, cut into programs for workers and for servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from distjax.jax_compat import ShapedArray
from distjax.variables.storage import StoredArray


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A pure function of flat arrays, jitted by its runner.

    Attributes:
      name: its name in error texts.
      fn: (*arrays) -> tuple of arrays.
      avals: shapes and dtypes of the arrays.
    """

    name: str
    fn: Callable[..., tuple[jax.Array, ...]]
    avals: tuple[ShapedArray, ...]


@dataclasses.dataclass(frozen=True)
class Push:
    """What one stage sends to one server, and what it gets back.

    Attributes:
      server: its number.
      operands: slots of the worker that are sent there.
      takes: keys of variables at this server that the program reads.
      writes: those that it gives new values; a subset of `takes`.
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
    """A part of the step on the worker, and the pushes that follow it.

    Attributes:
      operands: slots that the program reads.
      results: slots that it fills.
      program: (*operands) -> (*results).
      pushes: independent of each other, so sent in parallel.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    program: Program
    pushes: tuple[Push, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """A cut step: programs that read and fill numbered slots on the worker.

    Attributes:
      name: the step's name.
      arguments: slots of the flat arguments.
      pulls: (slot, key of a variable) pairs: the snapshot that a worker starts from.
      stages: in order.
      results: slots of the flat results.
      rebuild: flat results -> the result of the user's function.
      owners: key of every variable used -> the number of its server.
      kept: storage of variables, which keeps their values on the servers while the plan lives.
      varying: slots with a row for each replica of a worker; the others hold one value for all.
      argument_names: of the flat arguments, in the user's words.
    """

    name: str
    arguments: tuple[int, ...]
    pulls: tuple[tuple[int, str], ...]
    stages: tuple[Stage, ...]
    results: tuple[int, ...]
    rebuild: Callable[[Sequence[jax.Array]], Any]
    owners: Mapping[str, int]
    kept: tuple[StoredArray, ...] = ()
    varying: frozenset[int] = frozenset()
    argument_names: tuple[str, ...] = ()


def writes(stage: Stage) -> bool:
    """Returns whether any push of a stage writes."""
    return any(push.writes for push in stage.pushes)


def count_writes(plan: StepPlan) -> int:
    """Returns the number of stages that write."""
    return sum(map(writes, plan.stages))
