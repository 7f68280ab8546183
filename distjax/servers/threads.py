"""ThreadEngine: workers are threads and servers are objects, in this process."""

# Pull, compute and push pass futures on, so a worker begins its next closure while this one's
# programs run. Only a push waits until the worker's part of the stage is computed; otherwise the
# next to pull would wait for it too, and workers would compute one after the other. A lone worker
# has no one to keep waiting, and pushes at once.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from distjax.jax_compat import ShapedArray
from distjax.placement.topology import Topology
from distjax.servers.attempt import Attempt, Parcel
from distjax.servers.engine import Engine, Ran, Task
from distjax.servers.gate import Gate, admitted, turn
from distjax.servers.plan import Push, count_writes
from distjax.servers.programs import CompiledPlans, Given, Programs, struct_of
from distjax.servers.server import Answer, Server

#: (point, worker, closure): called at the points of a possible failure; may raise one.
Fault = Callable[[str, int, int], None]


class ThreadEngine(Engine):
    """Runs workers as threads of this process, and servers on its devices.

    Args:
      fault: for tests: called as ``fault(point, worker, closure)`` at the points "pull",
        "before_push" and "after_push", where it may raise `WorkerDied`, and "server", just
        before a push is applied, where it may raise `ServerDied`.

    Example:
      >>> engine = dj.servers.ThreadEngine()
      >>> strategy = dj.ParameterServerStrategy(workers=2, engine=engine)
    """

    max_failures = 3

    def __init__(self, *, fault: Fault | None = None):
        self._fault = fault
        self._servers: list[Server] = []
        self._homes: Sequence[Topology] = ()
        self._gate: Gate | None = None
        self._programs = Programs()
        self._compiled = CompiledPlans()
        self._seen: set[int] = set()  # workers that run closures

    @property
    def servers(self) -> Sequence[Server]:
        return self._servers

    def __repr__(self) -> str:
        return "ThreadEngine()"

    def start(
        self,
        workers: Sequence[Topology],
        server_devices: Sequence[jax.Device],
        max_staleness: int | None,
    ) -> None:
        self._homes = tuple(workers)
        self._servers = [Server(i, device) for i, device in enumerate(server_devices)]
        self._gate = None if max_staleness is None else Gate(max_staleness)

    def run(self, worker: int, task: Task) -> Ran:
        home = self._homes[worker % len(self._homes)]
        self._seen.add(worker)
        ask = functools.partial(self._ask, worker=worker, closure=task.closure)
        near = _NearServers(self._servers, home, ask)
        with jax.default_device(home.devices[0]):
            attempt = Attempt(task, near, self._programs, home)
            attempt.compile(self._compiled)
            with admitted(self._gate, task.closure, count_writes(task.plan)):
                self._run_stages(attempt, task, ask)
        versions = (attempt.versions.get(s.number, s.version) for s in self._servers)
        return Ran(attempt.results, tuple(versions), tuple(attempt.tokens))

    def end_worker(self, worker: int) -> None:
        self._seen.discard(worker)

    def _run_stages(self, attempt: Attempt, task: Task, ask: Callable[[str], None]) -> None:
        ask("pull")
        attempt.pull()
        for number, stage in enumerate(task.plan.stages):
            attempt.compute(number)
            if not stage.pushes:
                continue
            if len(self._seen) > 1:
                jax.block_until_ready(attempt.tokens)
            ask("before_push")
            with turn(self._gate, task.closure, stage):
                attempt.push(number)
            ask("after_push")

    def _ask(self, point: str, worker: int, closure: int) -> None:
        """Lets the fault function raise."""
        if self._fault is not None:
            self._fault(point, worker, closure)


class _NearServers:
    """The servers, as a worker in the same process sees them."""

    def __init__(self, servers: Sequence[Server], home: Topology, ask: Callable[[str], None]):
        self._servers, self._home, self._ask = servers, home, ask

    def arrives_as(self, aval: ShapedArray, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return struct_of(aval, sharding)

    def compile_pull(self, wanted: Mapping[int, Sequence[str]]) -> None:
        for number, keys in wanted.items():
            self._servers[number].compile_pull(keys, self._home)

    def compile(self, task: Task, stage: int, push: Push, operands: Sequence[Given]) -> None:
        server = self._servers[push.server]
        sharding = SingleDeviceSharding(server.device)
        avals = push.program.avals[len(push.takes) :]
        forms = [
            x if isinstance(x, np.ndarray) else self.arrives_as(aval, sharding)
            for x, aval in zip(operands, avals, strict=True)
        ]
        server.compile(push.program, push.takes, push.writes, forms)

    def pull(
        self, wanted: Mapping[int, Sequence[str]]
    ) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        return {k: self._servers[k].pull(keys, self._home) for k, keys in wanted.items()}

    def push(self, task: Task, stage: int, parcels: Sequence[Parcel]) -> Iterable[Answer]:
        task.require_wanted()
        return [self._push(task, stage, parcel) for parcel in parcels]

    def _push(self, task: Task, stage: int, parcel: Parcel) -> Answer:
        push = parcel.push
        return self._servers[push.server].push(
            task.closure,
            stage,
            task.attempt,
            push.program,
            push.takes,
            push.writes,
            parcel.arrays,
            pulled=parcel.pulled,
            before=lambda: self._ask("server"),
        )
