"""ThreadEngine: workers are threads and servers are objects, in this process."""

# Pull, compute and push hand futures on, so a worker begins its next closure while this one's
# programs run. Only a push waits, until the worker's part of the stage is computed: or whoever
# pulls next would wait for it with the server, and workers would compute one after the other. One
# that is alone has nobody to keep waiting.

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax

from distjax.servers.applied import Answer
from distjax.servers.attempt import Attempt, Parcel
from distjax.servers.engine import Engine, Ran, Task
from distjax.servers.gate import Gate, admitted, turn
from distjax.servers.plan import count_writes
from distjax.servers.programs import Programs
from distjax.servers.store import Server

#: (point, worker, closure): called where something may go wrong, and raises what goes wrong there.
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
        self._worker_devices = tuple(worker_devices)
        self._servers = [Server(i, device) for i, device in enumerate(server_devices)]
        self._gate = None if max_staleness is None else Gate(max_staleness)

    def run(self, worker: int, task: Task) -> Ran:
        device = self._worker_devices[worker % len(self._worker_devices)]
        self._seen.add(worker)
        ask = functools.partial(self._ask, worker=worker, closure=task.closure)
        near = _NearServers(self._servers, device, ask)
        num_pushes = count_writes(task.plan)
        with jax.default_device(device), admitted(self._gate, task.closure, num_pushes):
            attempt = Attempt(task, near, self._programs, device)
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
            versions = (attempt.versions.get(s.number, s.version) for s in self._servers)
            return Ran(attempt.results, tuple(versions), tuple(attempt.tokens))

    def _ask(self, point: str, worker: int, closure: int) -> None:
        """Lets the fault function raise."""
        if self._fault is not None:
            self._fault(point, worker, closure)


class _NearServers:
    """The servers, as a worker of the same process sees them."""

    def __init__(self, servers: Sequence[Server], device: jax.Device, ask: Callable[[str], None]):
        self._servers, self._device, self._ask = servers, device, ask

    def pull(
        self, wanted: Mapping[int, Sequence[str]]
    ) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        return {k: self._servers[k].read(keys, self._device) for k, keys in wanted.items()}

    def push(self, task: Task, stage: int, parcels: Sequence[Parcel]) -> Iterable[Answer]:
        return [self._push(task, stage, parcel) for parcel in parcels]

    def _push(self, task: Task, stage: int, parcel: Parcel) -> Answer:
        task.require_wanted()
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
