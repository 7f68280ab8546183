"""ThreadEngine: workers are threads and servers are objects, in this process."""

# Pull, compute and push hand futures on, so a worker begins its next closure while this one's
# programs run. Only a push waits, until the worker's part of the stage is computed: or whoever
# pulls next would wait for it with the server, and workers would compute one after the other. One
# that is alone has nobody to keep waiting.

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax.errors import message
from distjax.servers.engine import Ran, Task
from distjax.servers.gate import Gate
from distjax.servers.placing import place
from distjax.servers.plan import Plan, Push, Stage
from distjax.servers.programs import Programs
from distjax.servers.store import Server

#: (point, worker, closure): called where something may go wrong, and raises what goes wrong there.
Fault = Callable[[str, int, int], None]


class ThreadEngine:
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
        self._worker_devices: Sequence[jax.Device] = ()
        self._gate: Gate | None = None
        self._programs = Programs()
        self._seen: set[int] = set()  # workers

    @property
    def servers(self) -> Sequence[Server]:
        return self._servers

    def __repr__(self) -> str:
        return "ThreadEngine()"

    def start(
        self,
        worker_devices: Sequence[jax.Device],
        server_devices: Sequence[jax.Device],
        max_staleness: int | None,
    ) -> None:
        if self._servers:
            raise ValueError(
                message(
                    "ParameterServerStrategy needs an engine of its own",
                    got="a ThreadEngine that another strategy has",
                    why="an engine holds the servers of one strategy",
                    fix='engine=dj.servers.ThreadEngine(), or engine="threads"',
                )
            )
        self._worker_devices = tuple(worker_devices)
        self._servers = [Server(i, device) for i, device in enumerate(server_devices)]
        self._gate = None if max_staleness is None else Gate(max_staleness)

    def run(self, worker: int, task: Task) -> Ran:
        device = self._worker_devices[worker % len(self._worker_devices)]
        self._seen.add(worker)
        num_pushes = sum(map(_writes, task.plan.stages))
        with jax.default_device(device), self._admitted(task.closure, num_pushes):
            attempt = _Attempt(self, worker, task, device)
            attempt.pull(task.plan)
            for number, stage in enumerate(task.plan.stages):
                attempt.compute(stage)
                attempt.push_all(number, stage)
            return attempt.ran(task.plan)

    @contextlib.contextmanager
    def _admitted(self, closure: int, num_pushes: int) -> Any:
        gate = self._gate if num_pushes else None
        if gate is None:
            yield
            return
        gate.pull(closure, num_pushes)
        try:
            yield
        finally:
            gate.forget(closure)

    def turn(self, closure: int, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the pushes of a stage are in time for the bound."""
        if self._gate is None or not _writes(stage):
            return contextlib.nullcontext()
        return self._gate.push(closure)

    @property
    def has_one_worker(self) -> bool:
        """Whether no other worker has ever run."""
        return len(self._seen) < 2

    def ask(self, point: str, worker: int, closure: int) -> None:
        """Lets the fault function raise."""
        if self._fault is not None:
            self._fault(point, worker, closure)

    def compute(self, stage: Stage, operands: Sequence[jax.Array]) -> Any:
        """Returns results and token of a stage at a worker."""
        return self._programs.run(stage.program, operands)


class _Attempt:
    """One attempt at a closure: the slots of its plan, and what was sent.

    Args:
      engine: asked for servers, turns and faults.
      worker: who runs it.
      task: what is run.
      device: the worker's.
    """

    def __init__(self, engine: ThreadEngine, worker: int, task: Task, device: jax.Device):
        self._engine, self._worker, self._task, self._device = engine, worker, task, device
        arrays = place(task.arrays, device)
        self._slots = dict(zip(task.plan.arguments, arrays, strict=True))
        self._pulled: dict[int, int] = {}  # by server
        self._pushed: dict[int, int] = {}
        self._tokens: list[jax.Array] = []

    def pull(self, plan: Plan) -> None:
        """Reads the snapshot: one version of each server."""
        self._ask("pull")
        by_server: dict[int, list[tuple[int, str]]] = {}
        for slot, key in plan.pulls:
            by_server.setdefault(plan.owners[key], []).append((slot, key))
        for server in {*plan.owners.values(), *by_server}:
            wanted = by_server.get(server, ())
            keys = [key for _, key in wanted]
            self._pulled[server], values = self._engine.servers[server].read(keys, self._device)
            self._slots.update(zip((slot for slot, _ in wanted), values, strict=True))

    def compute(self, stage: Stage) -> None:
        """Runs the worker's part of a stage."""
        operands = [self._slots[slot] for slot in stage.operands]
        results, token = self._engine.compute(stage, operands)
        self._slots.update(zip(stage.results, results, strict=True))
        self._tokens.append(token)

    def push_all(self, number: int, stage: Stage) -> None:
        """Pushes to each server, in a turn of the gate's."""
        if not stage.pushes:
            return
        if not self._engine.has_one_worker:
            jax.block_until_ready(self._tokens)
        self._ask("before_push")
        with self._engine.turn(self._task.closure, stage):
            for push in stage.pushes:
                self._task.require_wanted()
                self._push(number, push)
        self._ask("after_push")

    def _push(self, number: int, push: Push) -> None:
        operands = [self._slots[slot] for slot in push.operands]
        answer = self._engine.servers[push.server].push(
            self._task.closure,
            number,
            self._task.attempt,
            push.program,
            push.takes,
            push.writes,
            operands,
            pulled=self._pulled.get(push.server),
            before=lambda: self._ask("server"),
        )
        arrays = place(answer.arrays, self._device)
        self._slots.update(zip(push.answers, arrays, strict=True))
        self._pushed[push.server] = answer.version
        self._tokens.append(answer.token)

    def ran(self, plan: Plan) -> Ran:
        """Returns what it came to."""
        versions = tuple(
            self._pushed.get(server.number, self._pulled.get(server.number, server.version))
            for server in self._engine.servers
        )
        results = tuple(self._slots[slot] for slot in plan.results)
        return Ran(results, versions, tuple(self._tokens))

    def _ask(self, point: str) -> None:
        self._engine.ask(point, self._worker, self._task.closure)


def _writes(stage: Stage) -> bool:
    return any(push.writes for push in stage.pushes)
