"""RayEngine: workers and servers are processes of Ray's, on this machine or on several."""

# The coordinator's process traces, cuts and exports steps, and keeps the order of pushes where
# there is a bound on their staleness. Values go between workers and servers directly.

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from distjax.errors import message
from distjax.servers.engine import Engine, Ran, Task
from distjax.servers.gate import Gate, admitted, turn
from distjax.servers.on_ray import cluster
from distjax.servers.on_ray.exported import ShippedPlan, export_plan
from distjax.servers.on_ray.hello import greet
from distjax.servers.on_ray.options import actor_options, require_options
from distjax.servers.on_ray.sent import Sent
from distjax.servers.on_ray.server import RayServer
from distjax.servers.on_ray.workers import RayProcess, RayWorkers
from distjax.servers.plan import Plan, count_writes

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax.servers.on_ray.actors import ServerActor, WorkerActor


class RayEngine(Engine):
    """Runs workers and servers as processes of Ray's.

    Programs travel as StableHLO: these processes import distjax and JAX, and nothing of the
    user's. A worker that dies is replaced at once; a server that dies is a `ServerLostError`,
    and `Coordinator.restore` makes a new one.

    Args:
      address: of a cluster; None: the one that Ray is connected to, or RAY_ADDRESS names, or
        else a new one on this machine, which ends with this process.
      worker_resources: what Ray is to reserve for each worker, as ``{"num_gpus": 1}``; None: a
        core, or nothing in a cluster of our own.
      server_resources: the same for each server.
      runtime_env: as Ray has it: environment variables and packages of all these processes.
      max_failures: so many workers may be lost in one closure before it is given up.

    Raises:
      ImportError: Ray is not installed.
      TypeError, ValueError: other arguments.

    Example:
      ``strategy = dj.ParameterServerStrategy(workers=8, engine=dj.servers.RayEngine("auto"))``
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        worker_resources: Mapping[str, Any] | None = None,
        server_resources: Mapping[str, Any] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        max_failures: int = 3,
    ):
        require_options(address, worker_resources, server_resources, runtime_env, max_failures)
        cluster.require_ray()
        self.max_failures = max_failures
        is_ours = cluster.connect(address)
        options = functools.partial(actor_options, runtime_env=runtime_env, is_ours=is_ours)
        self._server_options = options(server_resources)
        self._servers: list[RayServer] = []
        self._epoch = 0  # one more each time that a server is made
        self.workers = RayWorkers(
            functools.partial(_make_worker, options(worker_resources)), max_failures
        )
        self._gate: Gate | None = None
        self._plans: weakref.WeakKeyDictionary[Plan, tuple[int, ShippedPlan]]
        self._plans = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()  # of plans
        self._dropped: list[int] = []  # plans that only the processes still have
        self._learning = threading.RLock()  # held while a plan or a server is made known

    @property
    def servers(self) -> Sequence[RayServer]:
        return self._servers

    def __repr__(self) -> str:
        return "RayEngine()"

    def start(
        self,
        worker_devices: Sequence[jax.Device],
        server_devices: Sequence[jax.Device],
        max_staleness: int | None,
    ) -> None:
        self._gate = None if max_staleness is None else Gate(max_staleness)
        # No circles: processes end when the last one lets go of the engine, not some time later.
        make_server = functools.partial(RayEngine._make_server, weakref.proxy(self))
        servers = [RayServer(i, make_server) for i in range(len(server_devices))]
        for worker in range(len(worker_devices)):
            self.workers.begin(worker)
        for server in servers:
            server.greet()
        greet("worker 0", self.workers.begin(0).actor)
        self.workers.find(0)
        self._servers = servers

    def admit(self, plan: Plan) -> None:
        with self._learning:
            self._forget_dropped()
            if plan in self._plans:
                return
            number = next(self._numbers)
            platforms = self.workers.platforms, {s.platform for s in self._servers}
            shipped = export_plan(plan, len(self._servers), *platforms)
            for server, programs in zip(self._servers, shipped.for_servers, strict=True):
                server.call("learn", number, programs)
            self._plans[plan] = number, shipped
            weakref.finalize(plan, self._dropped.append, number)

    def require_data(self, at: str) -> None:
        if at == "coordinator":
            return
        raise ValueError(
            message(
                'create_per_worker_dataset needs at="coordinator", on RayEngine',
                got=f"at={at!r}",
                why="workers are sent programs and elements, and no Python of yours",
                fix='coordinator.create_per_worker_dataset(fn, at="coordinator")',
            )
        )

    def prepare(self, worker: int, is_wanted: Callable[[], bool]) -> bool:
        return self.workers.prepare(worker, is_wanted)

    def run(self, worker: int, task: Task) -> Sent | Ran:
        process = self.workers.find(worker)
        num_writes = count_writes(task.plan)
        sent = Sent(self, worker, process, task)
        if self._gate is None or not num_writes:
            sent.send("run")
            return sent
        with admitted(self._gate, task.closure, num_writes):
            return self._run_in_turns(sent, task)

    def end_worker(self, worker: int) -> None:
        self.workers.end(worker)

    def pid_of(self, worker: int) -> int | None:
        return self.workers.pid_of(worker)

    # -- what attempts ask ----------------------------------------------------

    @property
    def epoch(self) -> int:
        """A number that changes when a server is made anew."""
        return self._epoch

    def number_of(self, plan: Plan) -> int:
        """Returns the number of a plan that was admitted."""
        return self._plans[plan][0]

    def teach(self, process: RayProcess, plan: Plan) -> None:
        """Sends a worker a plan, and the servers that there are now."""
        import ray

        with self._learning:
            number, shipped = self._plans[plan]
            servers = [server.actor for server in self._servers]
            told = process.actor.learn.remote(number, shipped.for_workers, self._epoch, servers)
        ray.get(told)

    # -- inside ---------------------------------------------------------------

    def _run_in_turns(self, sent: Sent, task: Task) -> Ran:
        outcome = sent.ask("begin")
        for number, stage in enumerate(task.plan.stages):
            if outcome is not None:  # it has failed
                break
            with turn(self._gate, task.closure, stage):
                outcome = sent.ask("push", number)
        return sent.conclude(outcome)

    def _make_server(self, number: int) -> ActorHandle[ServerActor]:
        import ray

        from distjax.servers.on_ray.actors import ServerActor

        with self._learning:
            self._epoch += 1
            plans = {n: shipped.for_servers[number] for n, shipped in self._plans.values()}
            options: Any = self._server_options
            remote: Any = ray.remote(**options)
            return remote(ServerActor).remote(number, plans)

    def _forget_dropped(self) -> None:
        """Tells everybody which plans there are no more of."""
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        for actor in (*(s.actor for s in self._servers), *self.workers.actors()) if dropped else ():
            actor.forget.remote(dropped)


def _make_worker(options: Mapping[str, Any]) -> ActorHandle[WorkerActor]:
    import ray

    from distjax.servers.on_ray.actors import WorkerActor

    given: Any = {**options, "concurrency_groups": {"control": 1}}
    remote: Any = ray.remote(**given)
    return remote(WorkerActor).remote()
