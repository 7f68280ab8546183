"""What runs in a server's Ray process: no user code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import ray
from jax.sharding import SingleDeviceSharding

from distjax.context.thread_settings import ProgramModes
from distjax.servers.on_ray.startup import ProcessInfo, describe_this_process
from distjax.servers.on_ray.wire import OnWire, arrives_as, for_programs, from_wire, to_wire
from distjax.servers.plan import Program
from distjax.servers.server_contract import ServerSnapshot, Totals
from distjax.servers.store import Server


class Report(NamedTuple):
    """A server's report about itself: see `ParameterServer`; `plans` are the numbers it has."""

    version: int
    nbytes: int
    num_kept: int
    totals: Totals
    plans: tuple[int, ...]


class ServerActor:
    """A `Server` in its own process.

    Ray runs one call at a time, so no value changes while it is sent. Only `compile` runs beside
    the others.

    Args:
      number: its number in the strategy.
      plans: its programs by plan and stage, for all current plans.
    """

    def __init__(self, number: int, plans: Mapping[int, Mapping[int, Program]]):
        self._device = jax.local_devices()[0]
        self._server = Server(number, self._device)
        self._plans = dict(plans)

    def describe_process(self) -> ProcessInfo:
        return describe_this_process()

    def report(self) -> Report:
        server = self._server
        return Report(
            server.version, server.nbytes, server.num_kept, server.read_totals(), tuple(self._plans)
        )

    def add_plan(self, plan: int, programs: Mapping[int, Program]) -> None:
        """Stores the programs of a plan, by stage."""
        self._plans[plan] = programs

    def drop_plans(self, plans: Iterable[int]) -> None:
        """Drops plans that the coordinator no longer has."""
        for plan in plans:
            self._plans.pop(plan, None)

    def create(self, key: str, value: OnWire) -> None:
        with jax.enable_x64(True):  # as everywhere that values only pass through
            self._server.create(key, *from_wire([value], self._device))

    def remove(self, keys: Iterable[str]) -> None:
        self._server.remove(keys)

    def write(self, values: Mapping[str, OnWire]) -> int:
        with jax.enable_x64(True):
            return self._server.write(self._received(values))

    def add(self, amounts: Mapping[str, OnWire], modes: ProgramModes) -> int:
        with modes(), jax.enable_x64(True):
            return self._server.add(self._received(amounts))

    def read(self, keys: Sequence[str], *, is_pull: bool) -> tuple[int, list[OnWire]]:
        """Returns the version, and the values at that version."""
        with jax.enable_x64(True):
            version, values = self._server.view(keys, is_pull=is_pull)
            return version, to_wire(values)

    def _received(self, values: Mapping[str, OnWire]) -> dict[str, jax.Array]:
        return dict(zip(values, from_wire(list(values.values()), self._device), strict=True))

    @ray.method(concurrency_group="compiling")
    def compile(
        self, plan: int, stage: int, names: tuple[Sequence[str], Sequence[str]], modes: ProgramModes
    ) -> None:
        """Compiles a push, while others are applied: see `Server.compile`."""
        program, (takes, writes) = self._plans[plan][stage], names
        here = SingleDeviceSharding(self._device)
        arrays = [arrives_as(aval, here) for aval in program.avals[len(takes) :]]
        with modes():
            self._server.compile(program, takes, writes, arrays)

    def push(
        self,
        plan: int,
        stage: int,
        closure: int,
        attempt: int,
        names: tuple[Sequence[str], Sequence[str]],
        arrays: Sequence[OnWire],
        pulled: int | None,
        modes: ProgramModes,
    ) -> tuple[int, list[OnWire]]:
        """Returns version and answers of `Server.push`."""
        operands = for_programs(arrays, self._device)
        program = self._plans[plan][stage]
        with modes():
            answer = self._server.push(
                closure, stage, attempt, program, *names, operands, pulled=pulled
            )
        return answer.version, to_wire(answer.arrays)

    def mark_done(self, closures: Iterable[int]) -> None:
        """Drops closures that are over."""
        for closure in closures:
            self._server.mark_done(closure)

    def withdraw(self, closure: int) -> bool:
        return self._server.withdraw(closure)

    def snapshot(self) -> tuple[int, dict[str, OnWire]]:
        with jax.enable_x64(True):
            snapshot = self._server.snapshot()
            sent = to_wire(snapshot.values.values())
        return snapshot.version, dict(zip(snapshot.values, sent, strict=True))

    def restore(self, version: int, values: Mapping[str, OnWire], num_closures: int) -> None:
        arrays = self._received(values)
        with jax.enable_x64(True):
            self._server.restore(ServerSnapshot(version, arrays), num_closures)
