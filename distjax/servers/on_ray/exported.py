"""The wire form of plans: programs as StableHLO, and none of the user's code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import export
from jax.sharding import Sharding

from distjax.errors import UnsupportedError, message
from distjax.placement.topology import abstract_topology
from distjax.servers.placing import struct_of
from distjax.servers.plan import Plan, Program, Push, Stage


class StableFunction:
    """A function of flat arrays as StableHLO: sent as bytes, read at its first run.

    Args:
      blob: the serialized result of `jax.export`.
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
    """Raises if a received program would call Python, whatever its sender has checked."""
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
    """Stands in for a server's program, which workers do not have."""
    raise AssertionError("a program of a server, called at a worker")


@dataclasses.dataclass(frozen=True)
class ShippedPlan:
    """What is sent to workers and servers of a plan.

    Attributes:
      for_workers: the plan with the programs of workers.
      for_servers: for each server, its programs by stage.
    """

    for_workers: Plan
    for_servers: tuple[dict[int, Program], ...]


def export_plan(
    plan: Plan,
    num_servers: int,
    replicas: tuple[int, str],
    worker_platforms: Iterable[str],
    server_platforms: Iterable[str],
) -> ShippedPlan:
    """Returns a plan in the form in which it is sent.

    Args:
      plan: made by a strategy.
      num_servers: how many servers there are.
      replicas: how many replicas each worker has, and the name of their axis.
      worker_platforms: the platforms of its workers.
      server_platforms: the platforms of its servers.

    Raises:
      UnsupportedError: a program calls back to Python, or has no stable form.
    """
    for_servers: list[dict[int, Program]] = [{} for _ in range(num_servers)]
    stages: list[Stage] = []
    for number, stage in enumerate(plan.stages):
        for push in stage.pushes:
            for_servers[push.server][number] = _export(plan.name, push.program, server_platforms)
        stages.append(
            dataclasses.replace(
                stage,
                program=_export(
                    plan.name,
                    stage.program,
                    worker_platforms,
                    _shardings(stage.operands, plan, replicas),
                    _shardings(stage.results, plan, replicas),
                ),
                pushes=tuple(map(_without_program, stage.pushes)),
            )
        )
    for_workers = Plan(  # the other fields hold objects of the user or the strategy
        plan.name,
        plan.arguments,
        plan.pulls,
        tuple(stages),
        plan.results,
        tuple,
        plan.owners,
        varying=plan.varying,
    )
    return ShippedPlan(for_workers, tuple(for_servers))


def _without_program(push: Push) -> Push:
    return dataclasses.replace(
        push, program=Program(push.program.name, _run_elsewhere, push.program.avals)
    )


def _shardings(
    slots: Sequence[int], plan: Plan, replicas: tuple[int, str]
) -> tuple[Sharding, ...] | None:
    """Returns the shardings of slots over any worker's devices; None if it has one device."""
    if replicas[0] == 1:
        return None
    anywhere = abstract_topology(*replicas)
    each = (slot in plan.varying for slot in slots)
    return tuple(anywhere.per_replica if varying else anywhere.mirrored for varying in each)


def _export(
    name: str,
    program: Program,
    platforms: Iterable[str],
    ins: Sequence[Sharding] | None = None,
    outs: Sequence[Sharding] | None = None,
) -> Program:
    pairs = zip(program.avals, ins or (None,) * len(program.avals), strict=True)
    shapes = [struct_of(aval, sharding) for aval, sharding in pairs]
    jitted = jax.jit(program.fn, out_shardings=outs)
    make: Any = export.export(jitted, platforms=sorted(set(platforms)))
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
