"""Plans as they are shipped: programs as StableHLO, and nothing of the user's Python."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import jax
from jax import export

from distjax.errors import UnsupportedError, message
from distjax.servers.plan import Plan, Program, Push, Stage


class StableFunction:
    """A function of flat arrays as StableHLO: it is sent as bytes, and read where it first runs.

    Args:
      blob: what `jax.export` made of it.
    """

    def __init__(self, blob: bytes):
        self._blob = blob
        self._exported: export.Exported | None = None

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        if self._exported is None:
            self._exported = export.deserialize(bytearray(self._blob))
            _require_no_callback(self._exported)
        return tuple(self._exported.call(*arrays))

    def __reduce__(self) -> tuple[type[StableFunction], tuple[bytes]]:
        return StableFunction, (self._blob,)


def _require_no_callback(exported: export.Exported) -> None:
    """Raises where a program that came by the wire would call Python: it is looked at here too."""
    found = re.search(r"custom_call @(\w*callback\w*)", exported.mlir_module())
    if found is None:
        return
    raise UnsupportedError(
        message(
            "a program that is shipped needs to be all StableHLO",
            got=f"one that calls {found[1]}",
            why="it would call Python by an address of another process",
            fix="schedule steps by dj.Coordinator, which ships none of that kind",
        )
    )


def _run_elsewhere(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Stands for a program that is not where the plan is: servers have theirs, workers theirs."""
    raise AssertionError("a program of a server, called at a worker")


@dataclasses.dataclass(frozen=True)
class ShippedPlan:
    """What workers and servers are sent of a plan.

    Attributes:
      for_workers: with the programs of workers.
      for_servers: by server: its programs, by stage.
    """

    for_workers: Plan
    for_servers: tuple[dict[int, Program], ...]


def export_plan(
    plan: Plan, num_servers: int, worker_platforms: Iterable[str], server_platforms: Iterable[str]
) -> ShippedPlan:
    """Returns a plan to be shipped.

    Args:
      plan: a strategy has made.
      num_servers: how many servers there are.
      worker_platforms: those that its workers run on.
      server_platforms: those that its servers run on.

    Raises:
      UnsupportedError: a program calls back to Python, or has no stable form.
    """
    for_servers: list[dict[int, Program]] = [{} for _ in range(num_servers)]
    stages: list[Stage] = []
    for number, stage in enumerate(plan.stages):
        for push in stage.pushes:
            program = _export(plan.name, push.program, server_platforms)
            for_servers[push.server][number] = program
        stages.append(
            dataclasses.replace(
                stage,
                program=_export(plan.name, stage.program, worker_platforms),
                pushes=tuple(map(_without_program, stage.pushes)),
            )
        )
    for_workers = Plan(  # no more than that: the rest is the user's, or the strategy's
        plan.name,
        plan.arguments,
        plan.pulls,
        tuple(stages),
        plan.results,
        tuple,
        plan.owners,
        plan.is_read_only,
    )
    return ShippedPlan(for_workers, tuple(for_servers))


def _without_program(push: Push) -> Push:
    return dataclasses.replace(push, program=Program(push.program.name, _run_elsewhere))


def _export(name: str, program: Program, platforms: Iterable[str]) -> Program:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in program.avals]
    make: Any = export.export(jax.jit(program.fn), platforms=sorted(set(platforms)))
    try:
        blob = bytes(make(*shapes).serialize())
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedError(
            message(
                f"{name} needs programs that run in other processes, on RayEngine",
                got=f"one that cannot be shipped: {error}",
                why="workers and servers are sent StableHLO, and nothing of your Python: there is "
                "nothing that jax.debug.print, pure_callback or io_callback could call",
                fix="take the callback out of the step, and return what it needs; or run it on "
                'engine="threads"',
            )
        ) from error
    return Program(program.name, StableFunction(blob), program.avals)
