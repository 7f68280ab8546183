"""RayEngine: workers and servers are Ray processes, on this machine or on several."""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import importlib
import itertools
import os
import pathlib
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import distjax
from distjax._src.context import ProgramModes
from distjax._src.placement.topology import Topology
from distjax._src.servers.board import end_all
from distjax._src.servers.engine import Engine, Gate, Ran, Task, WorkerDied
from distjax._src.servers.on_ray.actors import (
    Disguised,
    Done,
    Order,
    ProcessDied,
    ProcessInfo,
    ServerActor,
    WorkerActor,
    export_plan,
    from_wire,
    get,
    own_versions,
    start_actor,
    to_wire,
)
from distjax._src.servers.per_worker import NumberedElements, RemoteArray
from distjax._src.servers.plan import StepPlan, count_writes
from distjax._src.servers.server import ParameterServer, Report, ServerSnapshot, lost_error
from distjax._src.typing import ArrayLike, PyTree
from distjax.errors import ClusterError, message, require, require_int

# The coordinator's process traces, cuts and exports steps, and orders the pushes if their
# staleness is bounded. Values go directly between workers and servers.

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

_LOOK_SECONDS = 0.1  # how often a wait for a process checks whether it is still wanted


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
      ValueError: `max_failures` is below 1. What Ray does not take, it refuses itself.

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
        require_int(
            "RayEngine: max_failures",
            max_failures,
            1,
            why="so many workers may be lost in one closure before it is given up",
            fix="dj.servers.RayEngine(max_failures=3)",
        )
        self.max_failures = max_failures
        is_ours = connect(address)
        options = functools.partial(actor_options, runtime_env=runtime_env, is_ours=is_ours)
        self._make_server = functools.partial(
            start_actor, ServerActor, "compile", options(server_resources)
        )
        self._worker_options = functools.partial(options, worker_resources)
        self._servers: list[RayServer] = []
        self._replicas: tuple[int, str]  # of a worker, and the name of their axis
        self._make_worker: Callable[[], ActorHandle[WorkerActor]]
        self._processes: dict[int, RayProcess] = {}  # of workers, at most one for each
        self._replacing = threading.Lock()
        self._gate: Gate
        #: With their numbers, as Ray keeps them for workers.
        self._plans = weakref.WeakKeyDictionary[StepPlan, tuple[int, Any]]()
        self._numbers = itertools.count()  # of plans and datasets
        self._announcing = threading.Lock()  # held while plans, or those of a process, change

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
        options = self._worker_options(self._replicas[0])
        self._make_worker = functools.partial(
            start_actor, WorkerActor, "draw", options, *self._replicas
        )
        servers = [RayServer(i, self._make_server) for i in range(len(server_devices))]
        for worker in range(len(workers)):
            self.begin(worker)
        for server in servers:
            server.wait_for_start()
        self.begin(0).require_start()
        self._servers = servers

    def admit(self, plan: StepPlan) -> None:
        import ray

        with self._announcing:
            if plan not in self._plans:
                infos = [process.info for process in tuple(self._processes.values())]
                platforms = {info.platform for info in infos if info is not None}  # known so far
                at_servers = {server.platform for server in self._servers}
                shipped = ray.put(export_plan(plan, self._replicas, platforms, at_servers))
                self._plans[plan] = next(self._numbers), shipped

    def open_data(self, worker: int, make: Callable[[], Iterable[Any]]) -> NumberedElements:
        return RemoteElements(self, worker, next(self._numbers), make)

    def prepare(self, worker: int, is_wanted: Callable[[], bool]) -> bool:
        return self.find(worker, is_wanted) is not None

    def run(self, worker: int, task: Task) -> Sent | Ran:
        num_writes = count_writes(task.plan)
        sent = Sent(self, worker, task)
        if self._gate.is_open or not num_writes:
            sent.send("run")
            return sent
        with self._gate.admitted(task.closure, num_writes):
            done = sent.ask("begin")
            for stage in (s for s in task.plan.stages if s.pushes):
                with self._gate.turn(task.closure, stage):
                    done = sent.ask("push")
            return sent.conclude(done)

    def name_devices(self, home: Topology) -> tuple[str, ...]:
        return tuple(f"device {i} of its process" for i in range(home.num_replicas))

    # -- the processes of workers -----------------------------------------------

    def begin(self, worker: int) -> RayProcess:
        """Returns the process of a worker, which may still be starting."""
        with self._replacing:
            if worker not in self._processes:
                actor = self._make_worker()
                process = RayProcess(f"worker {worker}", actor, self._replicas[0])
                self._processes[worker] = process
            return self._processes[worker]

    def find(self, worker: int, is_wanted: Callable[[], bool] = lambda: True) -> RayProcess | None:
        """Returns the process of a worker, ready to be used; waits for it while it is wanted.

        Raises:
          ClusterError: `max_failures` in a row have not started, or cannot be used.
        """
        for failures in itertools.count(1):
            process = self.begin(worker)
            try:
                while is_wanted() or process.info is not None:
                    if process.wait(_LOOK_SECONDS):
                        return process
                return None
            except ClusterError:
                self._drop(worker, process)
                if failures == self.max_failures:
                    raise

    def replace_dead(self, worker: int, process: RayProcess) -> None:
        """Replaces a process that died."""
        self._drop(worker, process)
        self.begin(worker)

    def end_worker(self, worker: int) -> None:
        import ray

        process = self._processes.get(worker)
        if process is not None and ray.is_initialized():
            self._drop(worker, process)

    def _drop(self, worker: int, process: RayProcess) -> None:
        import ray

        with self._replacing:
            if self._processes.get(worker) is process:  # else another thread has dropped it
                del self._processes[worker]
                ray.kill(process.actor)  # in case it is only unreachable

    def pid_of(self, worker: int) -> int | None:
        process = self._processes.get(worker)
        return None if process is None or process.info is None else process.info.pid

    def introduce(self, plan: StepPlan, process: RayProcess) -> int:
        """Sends a worker the servers and a plan, unless it has them; returns the plan's number."""
        with self._announcing:
            number, shipped = self._plans[plan]
            servers = [server.actor for server in self._servers]
            if process.servers != servers:
                process.actor.set_servers.remote(servers)
                process.servers = servers
            if number not in process.plans:
                process.actor.add_plan.remote(number, shipped)
                process.plans.add(number)
        return number


# -- servers ------------------------------------------------------------------

#: How many finished closures, say, are reported to a server at once.
_TOLD_AT_ONCE = 8


class RayServer(ParameterServer):
    """A server in a Ray process."""

    def __init__(self, number: int, make: Callable[[int], ActorHandle[ServerActor]]):
        self.number = number
        self._make = make
        self._process = RayProcess(f"server {number}", make(number))
        self.is_lost = False
        self.platform = "cpu"
        self.pid = 0
        self._report = Report()  # the latest
        #: What the process is yet to be told: methods of its server, with their argument.
        self._untold: collections.deque[tuple[str, Any]] = collections.deque()

    def wait_for_start(self) -> None:
        """Waits until its process has started; a ClusterError if that is not usable."""
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

    def remove(self, keys: Iterable[str]) -> None:
        self._untold.append(("remove", list(keys)))  # a finalizer may not call Ray

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        return self._ask("read", keys)

    def write(self, values: Mapping[str, ArrayLike]) -> int:
        return self._ask("write", {key: jnp.asarray(x) for key, x in values.items()})

    def add(self, amounts: Mapping[str, ArrayLike]) -> int:
        values = {key: jnp.asarray(x) for key, x in amounts.items()}
        return self._ask("add", values, modes=ProgramModes.of_this_thread())

    def mark_done(self, closure: int) -> None:
        self._untold.append(("mark_done", closure))
        if len(self._untold) >= _TOLD_AT_ONCE:
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
            self.wait_for_start()
            self.is_lost = False
        self._ask("restore", snapshot, num_closures)

    def _ask(self, method: str, *args: object, modes: ProgramModes | None = None) -> Any:
        """Returns the result of a method of the process's `Server`, or raises its exception."""
        if self.is_lost:
            raise lost_error(self.number)
        self._tell()
        try:
            return from_wire(get(self.actor.ask.remote(method, to_wire(args), modes)))
        except ProcessDied as error:
            self.is_lost = True
            raise lost_error(self.number) from error

    def _tell(self) -> None:
        told: list[tuple[str, Any]] = []
        with contextlib.suppress(IndexError):  # other threads may add meanwhile
            while True:
                told.append(self._untold.popleft())
        if told and not self.is_lost:
            self.actor.tell.remote(told)


# -- attempts that were sent --------------------------------------------------


class Sent:
    """An attempt that was sent to a worker, in one call or in several."""

    def __init__(self, engine: RayEngine, worker: int, task: Task):
        process = engine.find(worker)
        assert process is not None, "it is wanted"
        self._engine, self._worker, self._process = engine, worker, process
        self._order = Order(
            engine.introduce(task.plan, process),
            task.closure,
            to_wire(list(task.arrays)),  # without what Ray keeps: the worker asks for that
            ProgramModes.of_this_thread(),
        )
        self._answer: Any = None

    def send(self, method: str) -> None:
        """Calls a method of the worker with the order."""
        self._answer = getattr(self._process.actor, method).remote(self._order)

    def ask(self, method: str) -> Done | None:
        """Calls a method of the worker, and returns its answer; None: it has more to push."""
        self.send(method)
        return self._answered()

    def wait(self) -> Ran:
        """Waits for the attempt's end; raises as `Engine.run` does."""
        return self.conclude(self._answered())

    def conclude(self, done: Done | None) -> Ran:
        """Returns the outcome of an attempt."""
        assert done is not None, "all stages have been asked for"
        versions, servers = done.versions, self._engine.servers
        return Ran(
            tuple(from_wire(done.results)),
            tuple(versions[s.number] if s.number in versions else s.version for s in servers),
        )

    def _answered(self) -> Done | None:
        try:
            return get(self._answer)
        except ProcessDied as death:
            self._engine.replace_dead(self._worker, self._process)
            raise WorkerDied(death, has_begun=self._process.blame()) from death


# -- per-worker data ----------------------------------------------------------


class RemoteElements(NumberedElements):
    """The elements of a dataset that a worker's process reads; their arrays are Ray's to keep."""

    def __init__(
        self, engine: RayEngine, worker: int, number: int, make: Callable[[], Iterable[Any]]
    ):
        from ray import cloudpickle

        try:
            self._pickled = cloudpickle.dumps(make)
        except Exception as error:
            raise TypeError(
                message(
                    "create_per_worker_dataset needs a function that can be pickled, on RayEngine",
                    got=f"one that cannot: {error}",
                    why="it is called in the processes of the workers",
                    fix="open files and connections inside of the function; or "
                    'create_per_worker_dataset(fn, at="coordinator")',
                )
            ) from error
        self._engine, self._worker, self._number = engine, worker, number

    def __getitem__(self, index: int) -> Any:
        described, arrays = self._draw(index)
        numbers = itertools.count()

        def as_array(leaf: PyTree) -> Any:
            if isinstance(leaf, jax.ShapeDtypeStruct):
                dtype = np.dtype(leaf.dtype)
                return RemoteArray(arrays, next(numbers), leaf.shape, dtype, _fetch)
            return from_wire(leaf)

        return jax.tree.map(as_array, described, is_leaf=lambda x: isinstance(x, Disguised))

    def _draw(self, index: int) -> tuple[Any, Any]:
        """Returns an element with a struct in place of each array, and Ray's reference to these."""
        failures = 0
        while True:
            process = self._engine.find(self._worker)
            assert process is not None, "it is wanted"
            draw: Any = process.actor.draw.options(num_returns=2)
            described, arrays = draw.remote(self._number, self._pickled, index)
            try:
                return get(described), arrays
            except ProcessDied as death:
                self._engine.replace_dead(self._worker, process)
                failures += 1
                if failures == self._engine.max_failures:
                    raise WorkerDied(death) from death  # it is the data that kills


def _fetch(arrays: ObjectRef[Any]) -> Sequence[np.ndarray]:
    """Returns the arrays of an element."""
    import ray

    return ray.get(arrays)


# -- the cluster --------------------------------------------------------------

# A cluster of our own listens only at 127.0.0.1, requires a token, and reports to no one. Ray reads
# these settings from the environment when it is imported and when it starts, so they are there for
# both, and the environment is restored afterwards. A Ray that was imported before does not know
# them: it is refused, unless it is connected. The token and Ray's logs are in a directory that is
# deleted when the process ends.

_starting = threading.Lock()
_folder: pathlib.Path | None = None  # of our own cluster, whose settings Ray was imported with
_started = False  # whether this process has started the cluster

#: Settings of our own cluster, unless the environment overrides them. Ray's object store costs more
#: than a message of a few hundred kilobytes, a common size of gradients; and Ray's processes, by
#: default at nice 15, are the main program here, not background jobs.
_DEFAULTS = {"RAY_max_direct_call_object_size": str(1 << 20), "RAY_worker_niceness": "0"}


def connect(address: str | None) -> bool:
    """Connects to a cluster; returns whether this process started it.

    The address None is the one that Ray is connected to, or named by RAY_ADDRESS, or a new one
    here; that is a ClusterError if the user has imported Ray.
    """
    global _started
    with _starting:
        is_new = address is None and "RAY_ADDRESS" not in os.environ
        is_imported = sys.modules.get("ray") is not None
        settings = _settings() if is_new and (_folder or not is_imported) else {}
        with _unchanged(settings):
            if not is_imported:
                _import_ray()
            import ray

            if ray.is_initialized():
                return _started
            if not is_new:
                ray.init(address=address, log_to_driver=False, configure_logging=False)
                return False
            require(
                settings,
                "RayEngine needs to import Ray itself, to start a cluster of its own",
                got="a Ray that was imported before",
                why="on import Ray reads that it is to listen at this machine only, and ask for a "
                "token",
                fix="engine = dj.servers.RayEngine() before `import ray`; or ray.init() for a "
                "cluster with Ray's own settings, which RayEngine() then uses",
                error=ClusterError,
            )
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(_folder),
            )
            _started = True
            return True


def _import_ray() -> None:
    try:
        importlib.import_module("ray")
    except ImportError as error:
        raise ImportError(
            message(
                "RayEngine needs the package ray",
                got=f"no such package ({error})",
                why="it is an optional part of distjax",
                fix="pip install 'distjax[ray]'; engine=\"threads\" needs nothing",
            )
        ) from error
    # Ray shuts down at exit; the threads that wait for it must end first.
    atexit.register(end_all, os.getpid())


def _settings() -> dict[str, str]:
    """Returns the environment of our own cluster; makes its folder and token the first time."""
    global _folder
    if _folder is None:
        _folder = pathlib.Path(tempfile.mkdtemp(prefix="distjax-ray-"))
        token = _folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        atexit.register(_end_cluster, os.getpid())
    return {
        **{name: os.environ.get(name, value) for name, value in _DEFAULTS.items()},
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # its other meaning: nothing beyond this machine
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(_folder / "token"),
    }


def _end_cluster(pid: int) -> None:
    """Shuts down the cluster of a process; a forked child has none."""
    global _started
    if os.getpid() != pid or _folder is None:
        return
    end_all(pid)  # first: a Ray call after shutdown would start another cluster
    if _started:
        importlib.import_module("ray").shutdown()
        _started = False
    shutil.rmtree(_folder, ignore_errors=True)


@contextlib.contextmanager
def _unchanged(settings: dict[str, str]) -> Generator[None]:
    """A context with environment variables; restores all of these, and the handler of SIGTERM."""
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


# -- what a process is given --------------------------------------------------


def actor_options(
    resources: Mapping[str, Any] | None,
    num_devices: int = 1,
    *,
    runtime_env: Mapping[str, Any] | None,
    is_ours: bool,
) -> dict[str, Any]:
    """Returns the Ray options of a process; CPU devices are made, if it has no others.

    The user's `runtime_env` takes precedence. In a cluster that this process started, processes
    share the installation, and nothing is reserved unless asked for.
    """
    options: dict[str, Any] = {"num_cpus": 0 if is_ours else 1, **(resources or {})}
    has_accelerator = bool({"num_gpus", "resources", "accelerator_type"}.intersection(options))
    variables = {
        # Otherwise this process's JAX_PLATFORMS is inherited, whatever the other machine has.
        "JAX_PLATFORMS": "" if has_accelerator else "cpu",
        "OMP_NUM_THREADS": str(max(1, int(options["num_cpus"]))),
    }
    if num_devices > 1:
        variables["JAX_NUM_CPU_DEVICES"] = str(num_devices)
    if is_ours:
        here = str(pathlib.Path(distjax.__file__).parents[1])
        path = os.environ.get("PYTHONPATH")
        variables["PYTHONPATH"] = os.pathsep.join([here, path] if path else [here])
    environment = dict(runtime_env or {})
    environment["env_vars"] = variables | dict(environment.get("env_vars", {}))
    # Ray must not restart or repeat anything: the engine knows what each process had in hand.
    return options | {"runtime_env": environment, "max_restarts": 0, "max_task_retries": 0}


# -- startup ------------------------------------------------------------------

#: How long the first processes may take to start: a cluster may have to make room for them.
START_SECONDS = 300.0


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


class RayProcess:
    """One process of a worker or a server; `info` is None while it starts.

    `servers` and `plans` are what it was told so far: plans by number.
    """

    def __init__(self, name: str, actor: ActorHandle[Any], num_devices: int = 1):
        self.name, self.actor = name, actor
        self.servers: Sequence[ActorHandle[Any]] = ()
        self.plans: set[int] = set()
        self._is_blamed = False
        self.info: ProcessInfo | None = None
        self._num_devices = num_devices
        self._answer: Any = actor.describe_process.remote()

    def wait(self, seconds: float) -> bool:
        """Returns whether it has started by then; a ClusterError if it failed, or is of no use."""
        if self.info is not None:
            return True
        name, count = self.name, self._num_devices
        try:
            info: ProcessInfo = get(self._answer, seconds)
        except TimeoutError:
            return False
        except ProcessDied as error:
            raise ClusterError(
                message(
                    f"{name} needs a process that starts",
                    got=str(error),
                    why="it imports distjax and JAX, before it is sent anything",
                    fix="install both on every machine of the cluster, or name them in "
                    "RayEngine(runtime_env=...); Ray's logs have all of it",
                )
            ) from error
        require(
            info.versions == own_versions(),
            f"{name} needs the versions of the coordinator: {_listed(own_versions())}",
            got=f"a process (pid {info.pid}) with {_listed(info.versions)}",
            why="programs and answers are sent in the form of one version",
            fix="install the same on every machine of the cluster, or name them in "
            "RayEngine(runtime_env=...)",
            error=ClusterError,
        )
        require(
            info.num_devices >= count,
            f"{name} needs {count} devices, one for each of its replicas",
            got=f"a process (pid {info.pid}) with {info.num_devices} on {info.platform}",
            why="the replicas of a worker run at the same time",
            fix=f'RayEngine(worker_resources={{"num_gpus": {count}}}); or fewer for each worker',
            error=ClusterError,
        )
        self.info = info
        return True

    def blame(self) -> bool:
        """Returns whether its death counts against the attempt that finds it dead.

        That is the oldest in hand, which may have killed it; the others had not begun.
        """
        is_first, self._is_blamed = not self._is_blamed, True
        return is_first

    def require_start(self) -> ProcessInfo:
        """Returns its description once it has started; raises a ClusterError if it does not."""
        require(
            self.wait(START_SECONDS),
            f"{self.name} needs a process within {START_SECONDS:g} s",
            got="none: the cluster has no room for it yet",
            why="Ray starts a process where the resources are that it is to have",
            fix="ask for less: RayEngine(worker_resources=..., server_resources=...); "
            "`ray status` says what there is",
            error=ClusterError,
        )
        assert self.info is not None, "it has started"
        return self.info
