"""RayEngine: workers and servers are Ray processes, on this machine or on several."""

# The coordinator's process traces, cuts and exports steps, and orders the pushes if their
# staleness is bounded. Values go directly between workers and servers.

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from distjax.context.thread_settings import ProgramModes
from distjax.errors import describe_value, message
from distjax.integers import require_int
from distjax.placement.topology import Topology
from distjax.servers.elements import Argument, NumberedElements, Place, RemoteArray
from distjax.servers.engine import Engine, Ran, Task
from distjax.servers.gate import Gate, admitted, turn
from distjax.servers.on_ray import cluster
from distjax.servers.on_ray.data import RemoteData
from distjax.servers.on_ray.processes import (
    RayProcess,
    RayWorkers,
    actor_options,
    drain,
    wait_for_start,
    with_devices,
)
from distjax.servers.on_ray.server import RayServer, make_server
from distjax.servers.on_ray.wire import (
    Done,
    Failed,
    OnWire,
    Order,
    Outcome,
    ServerGone,
    ShippedPlan,
    Stopped,
    Unknown,
    export_plan,
    from_wire,
    to_wire,
)
from distjax.servers.on_ray.worker import make_worker
from distjax.servers.plan import StepPlan, count_writes
from distjax.servers.server import lost_error

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax.servers.on_ray.server import ServerActor


class RayEngine(Engine):
    """Runs workers and servers as Ray processes.

    Programs are sent as StableHLO: the processes import distjax and JAX, but none of the
    user's code. A worker that dies is replaced at once; a server that dies raises a
    `ServerLostError`, and `Coordinator.restore` creates a new one.

    Args:
      address: of a cluster; None: the one that Ray is connected to, or named by RAY_ADDRESS, or
        else a new one on this machine, which ends with this process.
      worker_resources: what Ray reserves for each worker, such as ``{"num_gpus": 1}``; None: a
        core, or nothing in a cluster that this process started.
      server_resources: the same for each server.
      runtime_env: Ray's `runtime_env`: environment variables and packages of all processes.
      max_failures: how many workers one closure may lose before it is given up.

    Raises:
      ImportError: Ray is not installed.
      TypeError, ValueError: invalid arguments.

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
        _require_options(address, worker_resources, server_resources, runtime_env, max_failures)
        self.max_failures = max_failures
        is_ours = cluster.connect(address)
        options = functools.partial(actor_options, runtime_env=runtime_env, is_ours=is_ours)
        self._server_options = options(server_resources)
        self._servers: list[RayServer] = []
        self._worker_options = options(worker_resources)
        self._replicas: tuple[int, str]  # of a worker, and the name of their axis
        self.workers: RayWorkers
        self._data: RemoteData
        self._gate: Gate | None
        self._plans = weakref.WeakKeyDictionary[StepPlan, tuple[int, ShippedPlan]]()
        self._numbers = itertools.count()  # of plans
        self._dropped: collections.deque[int] = collections.deque()  # only processes have them
        self._announcing = threading.RLock()  # held while a plan or a server is announced

    @property
    def servers(self) -> Sequence[RayServer]:
        return self._servers

    def __repr__(self) -> str:
        return "RayEngine()"

    def start(
        self,
        workers: Sequence[Topology],
        server_devices: Sequence[jax.Device],
        max_staleness: int | None,
    ) -> None:
        self._gate = None if max_staleness is None else Gate(max_staleness)
        self._replicas = workers[0].num_replicas, workers[0].axis_name
        options = with_devices(self._worker_options, self._replicas[0])
        make = functools.partial(make_worker, options, *self._replicas)
        self.workers = RayWorkers(make, self.max_failures, self._replicas[0])
        self._data = RemoteData(self.workers, self.max_failures)
        # No cycles: processes end when the engine's last reference goes, not some time later.
        make_server = functools.partial(RayEngine._make_server, weakref.proxy(self))
        servers = [RayServer(i, make_server) for i in range(len(server_devices))]
        for worker in range(len(workers)):
            self.workers.begin(worker)
        for server in servers:
            server.wait_for_start()
        wait_for_start("worker 0", self.workers.begin(0).actor)
        self.workers.find(0)
        self._servers = servers

    def admit(self, plan: StepPlan) -> None:
        with self._announcing:
            self._send_dropped()
            if plan in self._plans:
                return
            number = next(self._numbers)
            platforms = self.workers.platforms, {s.platform for s in self._servers}
            shipped = export_plan(plan, len(self._servers), self._replicas, *platforms)
            for server, programs in zip(self._servers, shipped.for_servers, strict=True):
                server.call("add_plan", number, programs)
            self._plans[plan] = number, shipped
            weakref.finalize(plan, self._dropped.append, number)

    def open_data(self, worker: int, make: Callable[[], Iterable[Any]]) -> NumberedElements:
        return self._data.open(worker, make)

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

    def name_devices(self, home: Topology) -> tuple[str, ...]:
        return tuple(f"device {i} of its process" for i in range(home.num_replicas))

    def pid_of(self, worker: int) -> int | None:
        return self.workers.pid_of(worker)

    # -- for attempts -----------------------------------------------------------

    @property
    def epoch(self) -> int:
        """A number that changes when a server is replaced."""
        return sum(server.num_processes for server in self._servers)

    def number_of(self, plan: StepPlan) -> int:
        """Returns the number of an admitted plan."""
        return self._plans[plan][0]

    def send_plan(self, process: RayProcess, task: Task) -> None:
        """Sends a worker a plan, its data sources, and the current servers."""
        import ray

        told = self._data.send(process.actor, task.arrays)
        with self._announcing:
            number, shipped = self._plans[task.plan]
            epoch = self.epoch  # first: a server replaced after this is sent with the next order
            servers = [server.actor for server in self._servers]
            told.append(process.actor.add_plan.remote(number, shipped.for_workers, epoch, servers))
        for answer in ray.get(told):
            if isinstance(answer, Failed):
                raise answer.error

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
        with self._announcing:
            plans = {n: shipped.for_servers[number] for n, shipped in self._plans.values()}
            return make_server(self._server_options, number, plans)

    def _send_dropped(self) -> None:
        """Tells all processes which plans to drop."""
        dropped = drain(self._dropped)
        for actor in (*(s.actor for s in self._servers), *self.workers.actors()) if dropped else ():
            actor.drop_plans.remote(dropped)


# -- attempts that were sent --------------------------------------------------

_LOOK_SECONDS = 0.1  # how often to check whether a running attempt is still wanted


def _as_sent(array: Argument) -> OnWire | Place:
    return array.place if isinstance(array, RemoteArray) else to_wire(array)


class Sent:
    """An attempt that was sent to a worker, in one call or in several.

    Args:
      engine: the engine.
      worker: the worker's number.
      process: the worker's process.
      task: the task to run.
    """

    def __init__(self, engine: RayEngine, worker: int, process: RayProcess, task: Task):
        self._engine, self._worker, self._process, self._task = engine, worker, process, task
        self._order = Order(
            engine.number_of(task.plan),
            engine.epoch,
            task.closure,
            task.attempt,
            list(map(_as_sent, task.arrays)),
            ProgramModes.of_this_thread(),
        )
        self._call: tuple[str, tuple[int, ...]] = ("run", ())
        self._answer: Any = None
        self._is_stopped = False

    def send(self, method: str, *args: int) -> None:
        """Calls a method of the worker with the order."""
        self._call = method, args
        self._answer = getattr(self._process.actor, method).remote(self._order, *args)
        if self not in self._process.in_hand:
            self._process.in_hand.append(self)

    def ask(self, method: str, *args: int) -> Outcome:
        """Calls a method of the worker, and returns its outcome.

        Raises:
          WorkerDied: the worker died.
        """
        self.send(method, *args)
        return self._outcome()

    def wait(self) -> Ran:
        """Waits for the attempt's outcome; raises as `Engine.run` does."""
        return self.conclude(self._outcome())

    def conclude(self, outcome: Outcome) -> Ran:
        """Returns, or raises, the outcome of an attempt."""
        self.let_go()
        servers = self._engine.servers
        if isinstance(outcome, ServerGone):
            if self._order.epoch == self._engine.epoch:
                servers[outcome.server].is_lost = True
            raise lost_error(outcome.server)
        if isinstance(outcome, Failed):
            error = outcome.error
            if isinstance(error, Stopped):
                self._task.require_wanted()
            raise error
        assert isinstance(outcome, Done), "all stages have been asked for"
        versions = outcome.versions
        return Ran(
            tuple(from_wire(outcome.results)),
            tuple(versions[s.number] if s.number in versions else s.version for s in servers),
        )

    def let_go(self) -> None:
        """Removes the attempt from those the worker has in hand."""
        if self in self._process.in_hand:
            self._process.in_hand.remove(self)

    def _outcome(self) -> Outcome:
        from ray.exceptions import RayError, RayTaskError

        try:
            while isinstance(outcome := self._get(), Unknown):
                self._engine.send_plan(self._process, self._task)
                self._order = dataclasses.replace(self._order, epoch=self._engine.epoch)
                method, args = self._call
                self.send(method, *args)
            return outcome
        except RayTaskError as error:
            self.let_go()
            raise error.cause from None
        except RayError as error:
            raise self._engine.workers.replace_dead(
                self._worker, self._process, self, error
            ) from error
        except BaseException:  # such as that of a source of data, which the process cannot make
            self.let_go()
            raise

    def _get(self) -> Outcome:
        """Returns the worker's answer; tells it to stop if that is no longer wanted."""
        import ray
        from ray.exceptions import GetTimeoutError

        while True:
            try:
                return ray.get(self._answer, timeout=_LOOK_SECONDS)
            except GetTimeoutError:
                self._stop_unwanted()

    def _stop_unwanted(self) -> None:
        if self._is_stopped:
            return
        try:
            self._task.require_wanted()
        except BaseException:
            self._is_stopped = True
            self._process.actor.stop.remote(self._task.closure)


# -- options ------------------------------------------------------------------

_RESOURCES = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type")


def _require_options(
    address: object,
    worker_resources: object,
    server_resources: object,
    runtime_env: object,
    max_failures: object,
) -> None:
    """Raises a TypeError or ValueError unless these are options of a RayEngine."""
    if not isinstance(address, str | None):
        raise TypeError(
            message(
                "RayEngine: address needs a string or None",
                got=describe_value(address),
                why="it names a cluster of Ray's",
                fix='dj.servers.RayEngine("auto"), or None for one on this machine',
            )
        )
    require_int(
        "RayEngine: max_failures",
        max_failures,
        1,
        why="so many workers may be lost in one closure before it is given up",
        fix="dj.servers.RayEngine(max_failures=3)",
    )
    _require_resources("worker_resources", worker_resources)
    _require_resources("server_resources", server_resources)
    if not isinstance(runtime_env, Mapping | None):
        raise TypeError(
            message(
                "RayEngine: runtime_env needs a dict or None",
                got=describe_value(runtime_env),
                why="Ray makes the processes of workers and servers with it",
                fix='dj.servers.RayEngine(runtime_env={"env_vars": {"XLA_FLAGS": "..."}})',
            )
        )


def _require_resources(name: str, resources: object) -> None:
    if resources is None:
        return
    if isinstance(resources, Mapping) and set(resources) <= set(_RESOURCES):
        return
    raise ValueError(
        message(
            f"RayEngine: {name} needs a dict with keys among {', '.join(_RESOURCES)}",
            got=describe_value(resources),
            why="Ray reserves it for each process; how these are restarted is the engine's",
            fix=f'dj.servers.RayEngine({name}={{"num_gpus": 1}})',
        )
    )
