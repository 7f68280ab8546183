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
import jax.numpy as jnp
import numpy as np

from distjax._src.context.thread_settings import ProgramModes
from distjax._src.integers import require_int
from distjax._src.placement.topology import Topology
from distjax._src.servers.engine import Engine, Gate, Ran, Task, WorkerDied
from distjax._src.servers.on_ray import processes
from distjax._src.servers.on_ray.actors import make_server, make_worker
from distjax._src.servers.on_ray.processes import (
    RayProcess,
    RayWorkers,
    actor_options,
    drain,
    with_devices,
)
from distjax._src.servers.on_ray.wire import (
    Disguised,
    Done,
    Failed,
    OnWire,
    Order,
    Outcome,
    Place,
    ServerGone,
    ShippedPlan,
    Unknown,
    export_plan,
    from_wire,
    to_wire,
)
from distjax._src.servers.per_worker import Argument, NumberedElements, RemoteArray
from distjax._src.servers.plan import StepPlan, count_writes
from distjax._src.servers.server import ParameterServer, Report, ServerSnapshot, lost_error
from distjax._src.typing import ArrayLike, PyTree
from distjax.errors import describe_value, message, require

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax._src.servers.on_ray.actors import ServerActor


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
        is_ours = processes.connect(address)
        options = functools.partial(actor_options, runtime_env=runtime_env, is_ours=is_ours)
        self._server_options = options(server_resources)
        self._servers: list[RayServer] = []
        self._worker_options = options(worker_resources)
        self._replicas: tuple[int, str]  # of a worker, and the name of their axis
        self.workers: RayWorkers
        self._data: RemoteData
        self._gate: Gate
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
        self._gate = Gate(max_staleness)
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
        self.workers.begin(0).require_start()
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
        num_writes = count_writes(task.plan)
        sent = Sent(self, worker, self.workers.find(worker), task)
        if self._gate.is_open or not num_writes:
            sent.send("run")
            return sent
        with self._gate.admitted(task.closure, num_writes):
            outcome = sent.ask("begin")
            for stage in (s for s in task.plan.stages if s.pushes):
                if outcome is not None:  # it has failed
                    break
                with self._gate.turn(task.closure, stage):
                    outcome = sent.ask("push")
            return sent.conclude(outcome)

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

    def send_plan(self, process: RayProcess, plan: StepPlan) -> None:
        """Sends a worker a plan, and the current servers."""
        import ray

        with self._announcing:
            number, shipped = self._plans[plan]
            epoch = self.epoch  # first: a server replaced after this is sent with the next order
            servers = [server.actor for server in self._servers]
            told = process.actor.add_plan.remote(number, shipped.for_workers, epoch, servers)
        ray.get(told)

    # -- inside ---------------------------------------------------------------

    def _make_server(self, number: int) -> ActorHandle[ServerActor]:
        with self._announcing:
            plans = {n: shipped.for_servers[number] for n, shipped in self._plans.values()}
            return make_server(self._server_options, number, plans)

    def _send_dropped(self) -> None:
        """Tells all processes which plans to drop."""
        dropped = drain(self._dropped)
        for actor in (*(s.actor for s in self._servers), *self.workers.actors()) if dropped else ():
            actor.drop_plans.remote(dropped)


# -- servers ------------------------------------------------------------------

#: How many finished closures are reported to a server at once.
_TOLD_AT_ONCE = 8


class RayServer(ParameterServer):
    """A server in a Ray process.

    Attributes:
      num_processes: how many it has had.
      platform: its JAX platform.
    """

    def __init__(self, number: int, make: Callable[[int], ActorHandle[ServerActor]]):
        self.number = number
        self._make = make
        self._process = RayProcess(f"server {number}", make(number))
        self.num_processes = 1
        self.is_lost = False
        self.platform = "cpu"
        self.pid = 0
        self._over: collections.deque[int] = collections.deque()
        self._report = Report()  # the latest
        self._keys: set[str] = set()  # of current variables
        self._removed: collections.deque[str] = collections.deque()  # keys still to be dropped

    def wait_for_start(self) -> None:
        """Waits until its process has started.

        Raises:
          ClusterError: it has not started, or is not usable.
        """
        info = self._process.require_start()
        self.pid, self.platform = info.pid, info.platform

    @property
    def actor(self) -> ActorHandle[ServerActor]:
        """Its process."""
        return self._process.actor

    def report(self) -> Report:
        try:
            self._report = self._ask("report")
        except Exception:
            if not self.is_lost:
                raise
        return self._report

    def create(self, key: str, value: ArrayLike) -> None:
        self._ask("create", key, jnp.asarray(value))
        self._keys.add(key)

    def remove(self, keys: Iterable[str]) -> None:
        self._removed.extend(keys)  # a finalizer may not call Ray

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        return self._ask("read", keys)

    def write(self, values: Mapping[str, ArrayLike]) -> int:
        return self._ask("write", {key: jnp.asarray(x) for key, x in values.items()})

    def add(self, amounts: Mapping[str, ArrayLike]) -> int:
        values = {key: jnp.asarray(x) for key, x in amounts.items()}
        return self._ask("add", values, modes=ProgramModes.of_this_thread())

    def mark_done(self, closure: int) -> None:
        self._over.append(closure)
        if len(self._over) >= _TOLD_AT_ONCE:
            self._tell()

    def snapshot(self) -> ServerSnapshot:
        snapshot: ServerSnapshot = self._ask("snapshot")
        # Received values lie in Ray's store, which may have little room for long-lived ones.
        with jax.enable_x64(True):
            copies = {key: jnp.array(x, copy=True) for key, x in snapshot.values.items()}
        return ServerSnapshot(snapshot.version, copies)

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        self.report()  # a process that has died unseen
        if self.is_lost:
            self._process = RayProcess(f"server {self.number}", self._make(self.number))
            self.num_processes += 1  # last: whoever sees the number sees the process
            self.wait_for_start()
            self.is_lost = False
        held = {key: value for key, value in snapshot.values.items() if key in self._keys}
        self._ask("restore", ServerSnapshot(snapshot.version, held), num_closures)

    def call(self, method: str, *args: object) -> Any:
        """Returns the result of a method of its process, or raises its exception.

        Raises:
          ServerLostError: the process has died.
        """
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if self.is_lost:
            raise lost_error(self.number)
        self._tell()
        try:
            return ray.get(getattr(self.actor, method).remote(*args))
        except RayActorError as error:
            self.is_lost = True
            raise lost_error(self.number) from error
        except RayTaskError as error:
            raise error.cause from None

    def _ask(self, method: str, *args: object, modes: ProgramModes | None = None) -> Any:
        """Returns the result of a method of the `Server` in its process: see `call`."""
        return from_wire(self.call("ask", method, to_wire(args), modes))

    def _tell(self) -> None:
        over, removed = drain(self._over), drain(self._removed)
        self._keys.difference_update(removed)
        if (over or removed) and not self.is_lost:
            self.actor.tell.remote(over, removed)


# -- attempts that were sent --------------------------------------------------


class Sent:
    """An attempt that was sent to a worker, in one call or in several."""

    def __init__(self, engine: RayEngine, worker: int, process: RayProcess, task: Task):
        self._engine, self._worker, self._process, self._task = engine, worker, process, task
        elements = [x.element for x in task.arrays if isinstance(x, RemoteArray)]
        self._elements = [x for x in dict.fromkeys(elements) if isinstance(x, _DrawnElement)]
        self._order = Order(
            engine.number_of(task.plan),
            engine.epoch,
            task.closure,
            task.attempt,
            list(map(self._as_sent, task.arrays)),
            ProgramModes.of_this_thread(),
        )
        self._method = "run"
        self._answer: Any = None

    def _as_sent(self, array: Argument) -> OnWire | Place:
        if not isinstance(array, RemoteArray):
            return to_wire(array)
        assert isinstance(array.element, _DrawnElement), "as this engine draws them"
        return Place(self._elements.index(array.element), array.number, array.dtype)

    def send(self, method: str) -> None:
        """Calls a method of the worker with the order."""
        self._method = method
        # Ray hands the arrays of elements on: they do not come here if they are large.
        arrays = [] if method == "push" else [element.arrays for element in self._elements]
        self._answer = getattr(self._process.actor, method).remote(self._order, *arrays)
        if self not in self._process.in_hand:
            self._process.in_hand.append(self)

    def ask(self, method: str) -> Outcome:
        """Calls a method of the worker, and returns its outcome.

        Raises:
          WorkerDied: the worker died.
        """
        self.send(method)
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
            raise outcome.error
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
        import ray
        from ray.exceptions import ObjectLostError, RayError, RayTaskError

        try:
            while True:
                try:
                    outcome: Outcome = ray.get(self._answer)
                except RayTaskError as error:
                    if not isinstance(error.cause, ObjectLostError):
                        raise error.cause from None
                    for element in self._elements:  # with the machine that had it
                        element.draw()
                else:
                    if not isinstance(outcome, Unknown):
                        return outcome
                    self._engine.send_plan(self._process, self._task.plan)
                    self._order = dataclasses.replace(self._order, epoch=self._engine.epoch)
                self.send(self._method)
        except RayError as error:
            raise self._engine.workers.replace_dead(
                self._worker, self._process, self, error
            ) from error
        except BaseException:  # such as that of a source of data, which the process cannot make
            self.let_go()
            raise


# -- per-worker data ----------------------------------------------------------


class RemoteData:
    """The functions that make per-worker data, by number; worker processes draw from them.

    Args:
      workers: the processes.
      max_failures: how many of them may be lost while one element is drawn.
    """

    def __init__(self, workers: RayWorkers, max_failures: int):
        self._workers, self._max_failures = workers, max_failures
        self._numbers = itertools.count()
        self._dropped: collections.deque[int] = collections.deque()  # only processes have them

    def open(self, worker: int, make: Callable[[], Iterable[Any]]) -> RemoteElements:
        """Returns the elements of ``make()``, which is called in the worker's process.

        Raises:
          TypeError: the function cannot be pickled.
        """
        from ray import cloudpickle

        try:
            pickled = cloudpickle.dumps(make)
        except Exception as error:
            raise TypeError(_unpicklable(error)) from error
        number = next(self._numbers)
        elements = RemoteElements(self, worker, number, pickled)
        weakref.finalize(elements, self._dropped.append, number)
        return elements

    def draw(self, worker: int, number: int, pickled: bytes, index: int) -> tuple[Any, Any]:
        """Returns an element with a struct in place of each array, and a reference to its arrays.

        Raises:
          WorkerDied: too many processes were lost meanwhile.
          Exception: what the user's code raises, or `DataEnded`.
        """
        import ray
        from ray.exceptions import (
            RayError,
            RaySystemError,
            RayTaskError,
            UnserializableException,
        )

        failures = 0
        while True:
            process = self._workers.find(worker)
            self._send_dropped()
            try:
                draw: Any = process.actor.draw.options(num_returns=2)
                described, arrays = draw.remote(number, pickled, index)
                element: Any = ray.get(described)
            except RayTaskError as error:
                raise error.cause from None
            except (RaySystemError, UnserializableException):  # the element cannot be read here
                raise
            except RayError as error:
                death = self._workers.replace_dead(worker, process, None, error)
                failures += 1
                if failures == self._max_failures:
                    raise WorkerDied(death) from error  # it has begun: it is the data that kills
                continue
            if isinstance(element, Failed):
                raise element.error
            return element, arrays

    def _send_dropped(self) -> None:
        dropped = drain(self._dropped)
        for actor in self._workers.actors() if dropped else ():
            actor.drop_datasets.remote(dropped)


class RemoteElements(NumberedElements):
    """The elements of a dataset that a worker's process reads; their arrays are Ray's to keep."""

    def __init__(self, data: RemoteData, worker: int, number: int, pickled: bytes):
        self._data, self._worker, self._number, self._pickled = data, worker, number, pickled

    def __getitem__(self, index: int) -> Any:
        element = _DrawnElement(self, index)
        numbers = itertools.count()

        def as_array(leaf: PyTree) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                return RemoteArray(element, next(numbers), leaf.shape, np.dtype(leaf.dtype))
            return from_wire(leaf)

        described = element.draw()
        return jax.tree.map(as_array, described, is_leaf=lambda x: isinstance(x, Disguised))

    def draw(self, index: int) -> tuple[Any, Any]:
        """Returns the description of an element, and a reference to its arrays."""
        return self._data.draw(self._worker, self._number, self._pickled, index)

    def state(self) -> None:
        """Returns None: whoever draws an element by its number finds it."""

    def seek(self, index: int, state: object = None) -> None:
        """Does nothing: see `state`."""


class _DrawnElement:
    """An element that was drawn; if its machine is lost, it is made again.

    Attributes:
      arrays: Ray's reference to its arrays.
    """

    def __init__(self, elements: RemoteElements, index: int):
        self._elements, self._index = elements, index
        self.arrays: Any = None

    def draw(self) -> Any:
        """Draws it, perhaps again; returns its description."""
        described, self.arrays = self._elements.draw(self._index)
        return described

    def fetch(self, number: int) -> np.ndarray:
        """Returns one of its arrays."""
        import ray
        from ray.exceptions import ObjectLostError

        try:
            return ray.get(self.arrays)[number]
        except ObjectLostError:
            self.draw()
            return ray.get(self.arrays)[number]


def _unpicklable(error: Exception) -> str:
    return message(
        "create_per_worker_dataset needs a function that can be pickled, on RayEngine",
        got=f"one that cannot: {error}",
        why="it is called in the processes of the workers",
        fix="open files and connections inside of the function; or "
        'create_per_worker_dataset(fn, at="coordinator")',
    )


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
    require(
        isinstance(address, str | None),
        "RayEngine: address needs a string or None",
        got=describe_value(address),
        why="it names a cluster of Ray's",
        fix='dj.servers.RayEngine("auto"), or None for one on this machine',
        error=TypeError,
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
    require(
        isinstance(runtime_env, Mapping | None),
        "RayEngine: runtime_env needs a dict or None",
        got=describe_value(runtime_env),
        why="Ray makes the processes of workers and servers with it",
        fix='dj.servers.RayEngine(runtime_env={"env_vars": {"XLA_FLAGS": "..."}})',
        error=TypeError,
    )


def _require_resources(name: str, resources: object) -> None:
    if resources is None:
        return
    require(
        isinstance(resources, Mapping) and set(resources) <= set(_RESOURCES),
        f"RayEngine: {name} needs a dict with keys among {', '.join(_RESOURCES)}",
        got=describe_value(resources),
        why="Ray reserves it for each process; how these are restarted is the engine's",
        fix=f'dj.servers.RayEngine({name}={{"num_gpus": 1}})',
    )
