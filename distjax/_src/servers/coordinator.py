"""Parameter servers: the strategy, and the coordinator that schedules its steps on the workers."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distjax._src import jax_compat, user_mesh
from distjax._src.context import Destinations, frames
from distjax._src.data.options import InputContext
from distjax._src.objects.stateful import run_here
from distjax._src.placement.topology import (
    REPLICA_AXIS,
    Topology,
    local_devices,
    one_device_topology,
    take_local,
)
from distjax._src.placement.transfer import without_alias
from distjax._src.replica.arguments import require_call
from distjax._src.servers.board import Board, Call, Closure
from distjax._src.servers.cutting.description import CutDescription, describe_plan
from distjax._src.servers.cutting.plans import Cutter
from distjax._src.servers.engine import Engine, ThreadEngine
from distjax._src.servers.per_worker import (
    Cursor,
    DataEnded,
    Elements,
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerSource,
    PerWorkerValues,
    Position,
    RemoteArray,
    draw_each,
    require_source,
)
from distjax._src.servers.plan import StepPlan, home_of, lower, shardings_of
from distjax._src.servers.server import ParameterServer, Report, ServerSnapshot
from distjax._src.servers.storage import (
    ServerPlacement,
    ServerStorage,
    make_parts,
    policy_at_servers,
)
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.inspection import StrategyDescription
from distjax._src.strategies.strategy import Strategy
from distjax._src.typing import (
    PositionalArgs,
    PyTree,
    VariableAggregation,
    VariableModes,
    VariableSynchronization,
)
from distjax._src.user_lines import keep_user_lines
from distjax._src.variables.partitioners import Partitioner, require_partitioner
from distjax._src.variables.storage import StoredArray
from distjax._src.variables.variable import Variable
from distjax.errors import ContextError, describe_value, is_int, message, require, require_int

# -- the strategy --------------------------------------------------------------


class ParameterServerExtended(StrategyExtended):
    """The `extended` of a `ParameterServerStrategy`.

    Its topology has the replicas of a worker, all on the device where users get values.
    """

    def __init__(
        self,
        topology: Topology,
        board: Board,
        num_servers: int,
        partitioner: Partitioner | None,
        cut: str,
    ):
        (device,) = topology.devices
        self.at_servers = ServerPlacement(num_servers, device, partitioner)
        self._device = device
        super().__init__(topology, self.at_servers, wraps=topology.num_replicas > 1)
        self.board = board
        self.cutter = Cutter(topology, num_servers, cut, lambda: self.strategy)
        self._numbers = itertools.count()

    @property
    def servers(self) -> Sequence[ParameterServer]:
        """The servers."""
        return self.board.engine.servers

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``fn`` as one closure, and waits for it."""
        args, kwargs = require_call(fn, args, kwargs, "run")
        frames.require_enterable(self.strategy, "run")
        state = frames.current().state
        if state is not None:
            return run_here(self.strategy, fn, args, kwargs, state)
        assert isinstance(self.strategy, ParameterServerStrategy), "which makes it"
        return self.strategy.run_closure(fn, args, kwargs)

    def pause_writers(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which no closure runs."""
        return self.board.paused()

    # -- variables ------------------------------------------------------------

    def create_variable(
        self, initial_value: PyTree, *, name: str, modes: VariableModes, **options: Any
    ) -> Variable:
        """Makes a variable at a server (called by `Variable`)."""
        _require_modes(modes, name)
        find_policy = functools.partial(policy_at_servers, num_replicas=self.num_replicas)
        return super().create_variable(
            initial_value, name=name, modes=modes, find_policy=find_policy, **options
        )

    def make_storage(self, variable: Variable) -> StoredArray:
        """Returns what reads and writes the variable's value where it lives."""
        parts = make_parts(variable, next(self._numbers))
        return ServerStorage(
            variable, self.variable_lock, parts, self.servers, self.at_servers, self._device
        )

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Destinations) -> Generator[None]:
        """Places new variables at a variable's server; for `non_slot_devices`, at every server."""
        with super().colocate_vars_with(colocate_with_variable):
            if isinstance(colocate_with_variable, Variable):
                yield
                return
            frame = dataclasses.replace(
                frames.current(), colocate_with=self.at_servers.at_every_server
            )
            with frames.with_block(frame):
                yield


def _require_modes(modes: VariableModes, name: str) -> None:
    """Raises a ValueError for a variable that would need a component per worker."""
    synchronization, aggregation = modes
    is_on_read = synchronization is VariableSynchronization.ON_READ
    require(
        not is_on_read or aggregation is VariableAggregation.SUM,
        f"variable {name!r} at a parameter server needs ON_WRITE, or ON_READ with SUM",
        got=f"ON_READ + {aggregation.name}",
        why="workers come and go: there is one value, to which each adds what it has",
        fix="aggregation=dj.VariableAggregation.SUM for totals; synchronization=ON_WRITE for "
        "one value that every worker may set",
    )


CUTS = ("least_bytes", "arguments")


class ParameterServerStrategy(Strategy):
    """Variables live at servers; workers run steps concurrently, without waiting for each other.

    A step is written for one replica, as for any other strategy, and is cut automatically: what
    comes before a `merge_call` (optimizers make one, and each write of a variable is one) runs at a
    worker, on the values that the variables had when the step began; the merge function runs at
    the servers, on the values that they have by then.

    Args:
      workers: how many, on the local devices in turn; or a sequence of devices for each, all of the
        same length k: a worker with several is a sync group of k replicas, like a
        `MirroredStrategy`; None: one on each local device.
      servers: how many.
      partitioner: `FixedShards`, `MinSize` or `MaxSize` of `dj.parts`, or a function of shape and
        dtype: into how many shards a variable is split along its first axis. The shards live at
        different servers; everywhere else they are one variable.
      max_staleness: how many writes by others may come between a worker's read and its write;
        None: any number.
      engine: runs workers and servers: "threads", or an engine such as `dj.servers.ThreadEngine()`.
      cut: "least_bytes": the worker runs the part of a merge that minimizes the bytes sent, so it
        reduces gradients over its own replicas; "arguments": servers run all of a merge, so that
        one closure at a time gives the results of `OneDeviceStrategy`, to rounding: XLA may fuse a
        product that ends the worker's part with a sum that begins the server's. What differs per
        replica is then sent as k rows, since a reduction is part of the merge; the server adds them
        in order, as CPU devices do, so on CPU the bits are those of `MirroredStrategy`.
      axis_name: the name of the replica axis in a step (of size k, or 1).

    Raises:
      ValueError: a number below 1, something that is not a device, workers with different numbers
        of devices, or an unknown `cut`.
      TypeError: a partitioner that is not callable.

    Source: tf.distribute.experimental.ParameterServerStrategy (TF 2).
    """

    def __init__(
        self,
        workers: int | Sequence[Sequence[jax.Device]] | None = None,
        servers: int = 1,
        *,
        partitioner: Partitioner | None = None,
        max_staleness: int | None = None,
        engine: Engine | str = "threads",
        cut: str = "least_bytes",
        axis_name: str = REPLICA_AXIS,
    ):
        _require_count(servers, "servers")
        require_partitioner("ParameterServerStrategy", partitioner)
        require(
            max_staleness is None or (is_int(max_staleness) and max_staleness >= 0),
            "ParameterServerStrategy: max_staleness needs None or an int of 0 or more",
            got=describe_value(max_staleness),
            why="it bounds how many writes come between a worker's reading and its writing",
            fix="dj.ParameterServerStrategy(max_staleness=4); 0 is one step at a time",
        )
        require(
            cut in CUTS,
            f"ParameterServerStrategy: cut needs one of {', '.join(map(repr, CUTS))}",
            got=describe_value(cut),
            why="it says which part of a merge the worker does",
            fix="dj.ParameterServerStrategy(cut='arguments') for the results of OneDeviceStrategy",
        )
        homes = self._homes = [home_of(each, axis_name) for each in _as_workers(workers)]
        self.worker_devices = tuple(home.devices for home in homes)
        self.max_staleness = max_staleness
        self.engine = _as_engine(engine)
        devices = local_devices()
        self.engine.start(
            homes,
            [devices[i % len(devices)] for i in range(servers)],
            max_staleness,
        )
        topology = one_device_topology(devices[0], homes[0].num_replicas, axis_name)
        self.board = Board(self.engine)
        super().__init__(ParameterServerExtended(topology, self.board, servers, partitioner, cut))

    @property
    def extended(self) -> ParameterServerExtended:
        """The methods for algorithms that need to be distribution-aware."""
        assert isinstance(self._extended, ParameterServerExtended)
        return self._extended

    @property
    def num_workers(self) -> int:
        """The initial number of workers."""
        return len(self.worker_devices)

    @property
    def servers(self) -> Sequence[ParameterServer]:
        """The servers."""
        return self.engine.servers

    def cut_step(
        self,
        fn: Callable[..., Any],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> tuple[StepPlan, Sequence[jax.Array | np.ndarray]]:
        """Returns the plan of a step, and its flat arguments; traces it the first time."""
        return self.extended.cutter.cut(fn, args, None if kwargs is None else dict(kwargs))

    def run_closure(
        self, fn: Callable[..., Any], args: PositionalArgs, kwargs: dict[str, Any]
    ) -> Any:
        """Runs a step as one closure, and returns its result: ``strategy.run``."""
        return run_step(self, fn, args, kwargs)

    @user_mesh.ignores_user_mesh
    def describe_cut(
        self, fn: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None
    ) -> tuple[CutDescription, list[jax.stages.Lowered]]:
        """Returns what a step is cut into, and worker 0's programs if it has several devices."""
        plan, _ = self.cut_step(fn, args, kwargs)
        home = self._homes[0]
        stages = plan.stages if home.mesh is not None else ()
        lowered = [lower(stage.program, *shardings_of(stage, plan, home)) for stage in stages]
        return describe_plan(plan, list(self.extended.variables)), lowered

    def describe(self, only: str = "", *, full: bool = False) -> StrategyDescription:
        """Returns a table of each worker's devices, and each variable's location and bytes.

        Context: any. Cost: each variable is fetched once.

        Example:
          >>> devices = jax.devices()
          >>> strategy = dj.ParameterServerStrategy(workers=[devices[:2], devices[2:4]])
          >>> print(strategy.describe())
          ParameterServerStrategy(workers=2, servers=1)
            replicas of each worker  2
            devices of worker 0      2, one for each replica: ...
            devices of worker 1      2, one for each replica: ...
            variables                0
            bytes per device         0 B
        """
        workers = tuple(map(self.engine.name_devices, self._homes))
        devices = tuple(name for own in workers for name in own)
        found = super().describe(only, full=full)
        return dataclasses.replace(found, devices=devices, devices_per_replica=1, workers=workers)

    def __repr__(self) -> str:
        return f"ParameterServerStrategy(workers={self.num_workers}, servers={len(self.servers)})"


def _as_engine(engine: Engine | str) -> Engine:
    if engine == "threads":
        return ThreadEngine()
    require(
        isinstance(engine, Engine),
        'ParameterServerStrategy: engine needs "threads", or an engine',
        got=describe_value(engine),
        why="it runs workers and servers",
        fix="dj.ParameterServerStrategy(engine=dj.servers.ThreadEngine())",
    )
    assert isinstance(engine, Engine), "as was checked"
    kind = type(engine).__name__
    require(
        not engine.servers,
        "ParameterServerStrategy needs an engine of its own",
        got=f"a {kind} that another strategy has",
        why="an engine holds the servers of one strategy",
        fix=f"engine={kind}(...) for each strategy",
    )
    return engine


def _as_workers(
    workers: int | Sequence[Sequence[jax.Device]] | None,
) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns the devices of each worker."""
    devices = local_devices()
    if workers is None or is_int(workers):
        take_local("ParameterServerStrategy", "workers=[[device], ...]")
    if workers is None:
        return tuple((device,) for device in devices)
    if is_int(workers) or isinstance(workers, bool):
        _require_count(workers, "workers")
        return tuple((devices[i % len(devices)],) for i in range(workers))
    each = [tuple(w) for w in workers] if isinstance(workers, (list, tuple)) else []
    require(
        each and all(w and all(isinstance(d, jax.Device) for d in w) for w in each),
        "ParameterServerStrategy: workers needs a number, or devices for each",
        got=describe_value(workers),
        why="each worker runs its replicas on devices, one replica on each",
        fix="dj.ParameterServerStrategy(workers=[[d] for d in jax.devices()])",
    )
    counts = sorted({len(w) for w in each})
    require(
        len(counts) == 1,
        "ParameterServerStrategy: workers needs as many devices for each",
        got=f"{' and '.join(map(str, counts))} devices",
        why="a step is cut once, for so many replicas, and any worker may run it",
        fix="dj.ParameterServerStrategy(workers=[devices[:2], devices[2:4]])",
    )
    return tuple(each)


def _require_count(value: object, name: str) -> None:
    why = "a step needs a worker to run at, and a server for its variables"
    fix = f"dj.ParameterServerStrategy({name}=2)"
    require_int(f"ParameterServerStrategy: {name}", value, 1, why=why, fix=fix)


# -- results ------------------------------------------------------------------


class RemoteValue:
    """The result of a closure, once a worker has run it.

    Source: tf.distribute.experimental.coordinator.RemoteValue.

    Args:
      closure: the closure.
      board: has it.
    """

    def __init__(self, closure: Closure, board: Board):
        self._closure, self._board = closure, board

    @property
    def version(self) -> tuple[int, ...]:
        """The version of each server: after its push, else as pulled.

        Waits as `get` does.
        """
        self._wait("version", None)
        if self._closure.versions is None:
            self._closure.result()  # raises
        assert self._closure.versions is not None
        return self._closure.versions

    def done(self) -> bool:
        """Returns whether `fetch` would return without waiting."""
        return self._closure.is_over

    def get(self) -> Any:
        """Waits as `fetch` does; returns the result as arrays on the worker's device."""
        self._wait("get", None)
        return self._closure.result()

    def fetch(self, timeout: float | None = None) -> Any:
        """Returns the step's result as numpy arrays.

        Args:
          timeout: maximum wait in seconds.

        Context: not in a replica function.

        Raises:
          ContextError: in a replica function; if it is not done, in ``with coordinator.paused()``
            or per-worker data.
          TimeoutError: it is not available by then.
          CancelledError: of `concurrent.futures`: the closure was cancelled.
          EndOfDataError: no worker has an element for it.
          ServerLostError: its pushes were lost with a server.
          Exception: the error of the closure.
        """
        self._wait("fetch", timeout)
        return to_numpy(self._closure.result())

    def _wait(self, method: str, timeout: float | None) -> None:
        require_outside_of_steps(method)
        if not self.done():
            self._board.require_going(method)
        require(
            self._board.waiters.wait_until(lambda: self._closure.is_over, timeout),
            f"{method} needs {self._closure!r} to end within {timeout} s",
            got=f"one that is {self._closure.state}",
            why="its worker has not got that far yet",
            fix="wait longer; coordinator.stats() says what workers do",
            error=TimeoutError,
        )

    def __repr__(self) -> str:
        return f"RemoteValue({self._closure!r}, {self._closure.state})"


def require_outside_of_steps(method: str) -> None:
    """Raises a ContextError in a replica function."""
    require(
        not frames.current().is_replica,
        f"{method} needs to be called outside of a replica function",
        got=f"a call in {frames.current().name}",
        why="a step is traced, and then runs at workers, which have no coordinator",
        fix="call it in the code that schedules the step; give the step values as arguments: "
        "args=(value.get(),)",
        error=ContextError,
    )


def to_numpy(tree: PyTree) -> Any:
    """Returns a tree with JAX arrays converted to numpy; PRNG keys stay as they are."""
    return jax.tree.map(_leaf_to_numpy, tree)


def _leaf_to_numpy(leaf: object) -> Any:
    if isinstance(leaf, jax.Array) and not jax_compat.is_key_dtype(leaf.dtype):
        return np.asarray(leaf)
    return leaf


# -- from a call to a closure -------------------------------------------------


def _cut(
    strategy: ParameterServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
    drawn: Mapping[PerWorkerSource, Any],
) -> Call:
    """Cuts a step for its arguments, with a worker's drawn values filled in.

    The arguments are the closure's own: `_take_over` has made them.
    """
    if drawn:
        own = lambda leaf: drawn[leaf] if _is_source(leaf) else leaf
        args, kwargs = jax.tree.map(own, (args, kwargs), is_leaf=_is_source)
    remote: dict[int, RemoteArray] = {}  # by the id of its stand-in
    stand_ins: list[np.ndarray] = []

    def stand_in(leaf: PyTree) -> Any:
        if not isinstance(leaf, RemoteArray):
            return leaf
        stand_ins.append(leaf.stand_in())
        remote[id(stand_ins[-1])] = leaf.astype(stand_ins[-1].dtype)
        return stand_ins[-1]

    args, kwargs = jax.tree.map(stand_in, (args, kwargs))
    plan, arrays = strategy.cut_step(fn, args, kwargs)
    strategy.engine.admit(plan)
    given = [remote.get(id(x), x) for x in arrays]
    num_found = sum(isinstance(x, RemoteArray) for x in given)
    assert num_found == len(remote), "a step would run on the zeros of a stand-in"
    return Call(plan, given)


def cut_call(
    board: Board,
    strategy: ParameterServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
    *,
    is_reported: bool = True,
) -> Closure:
    """Returns a closure for the board; errors of its trace are raised here."""
    given = dict(kwargs) if isinstance(kwargs, Mapping) else kwargs
    args, kwargs = require_call(fn, args, given, "schedule")
    args, kwargs, sources = _take_over(board, args, kwargs)
    cut = functools.partial(_cut, strategy, fn, args, kwargs)
    if sources:
        _cut_first(board, fn, cut, sources)
    call = cut if sources else cut({})
    name = getattr(fn, "__name__", type(fn).__name__)
    return Closure(name, call, sources, is_reported=is_reported)


def _take_over(
    board: Board, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
) -> tuple[tuple[PyTree, ...], dict[str, PyTree], tuple[PerWorkerSource, ...]]:
    """Returns arguments that the caller cannot change before a worker reads them; their sources."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    remote = next((leaf for leaf in leaves if isinstance(leaf, RemoteValue)), None)
    require(
        remote is None,
        "a step needs arguments that are there when it is scheduled",
        got=repr(remote),
        why="its closure might come before the one that it waits for",
        fix="coordinator.schedule(step, args=(value.get(),))",
    )
    found = dict.fromkeys(filter(_is_source, leaves))
    require(
        not (found and board.is_closed),
        "run needs an open coordinator for per-worker data",
        got=f"{next(iter(found), None)!r} among the arguments, and no coordinator",
        why="each of its workers has its own values, and without one the step runs here",
        fix="with dj.Coordinator(strategy) as coordinator: coordinator.schedule(step, args=(...,))",
        error=RuntimeError,
    )
    workers = board.worker_ids()
    own = {x: x.copy_for(workers) if isinstance(x, PerWorkerValues) else x for x in found}
    taken = [own[x] if _is_source(x) else without_alias(x) for x in leaves]
    args, kwargs = jax.tree.unflatten(treedef, taken)
    return args, kwargs, tuple(own.values())


def _is_source(leaf: object) -> bool:
    return isinstance(leaf, (PerWorkerIterator, PerWorkerValues))


def _cut_first(
    board: Board,
    fn: Callable[..., Any],
    cut: Callable[[Mapping[PerWorkerSource, Any]], Call],
    sources: Sequence[PerWorkerSource],
) -> None:
    """Traces for the first available values, so that errors are raised now.

    Once for a function and its iterators: the next element may take a while.
    """
    iterators = [source for source in sources if isinstance(source, PerWorkerIterator)]
    seen = board.iterators_of.get(fn)
    if iterators and seen.issuperset(iterators):
        return
    for worker in board.active_workers():
        try:
            with board.draw():
                values = draw_each((source, worker.number) for source in sources)
                for source, value in zip(sources, values, strict=True):
                    source.give_back(worker.number, value)  # the first closure is to have it
        except DataEnded:
            continue
        cut(dict(zip(sources, values, strict=True)))
        seen.update(iterators)
        return


def run_step(
    strategy: ParameterServerStrategy,
    fn: Callable[..., Any],
    args: Sequence[PyTree],
    kwargs: Mapping[str, PyTree] | None,
) -> Any:
    """Runs a step as one closure, and returns its result: ``strategy.run``.

    The open coordinator's workers run it; without one, it runs here and now.
    """
    board = strategy.board
    board.require_going("run")
    closure = cut_call(board, strategy, fn, args, kwargs, is_reported=False)
    while not (board.run_alone(closure) or board.put(closure)):
        pass  # a coordinator was opened or closed meanwhile
    return RemoteValue(closure, board).get()


# -- the coordinator ----------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Values and versions of all servers, at a moment when no closure was running.

    Attributes:
      closures: how many closures it contains.
      servers: the state of each server.
      positions: those in per-worker data, as long as their iterators are alive.
      strategy: the strategy of the servers, as long as it is alive.
    """

    closures: int
    servers: Sequence[ServerSnapshot]
    positions: weakref.WeakKeyDictionary[Cursor, Position]
    strategy: weakref.ref[ParameterServerStrategy]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the servers."""
        return tuple(server.version for server in self.servers)

    def __repr__(self) -> str:
        return f"Snapshot(closures={self.closures}, versions={self.versions})"


_QUEUED_PER_WORKER = 4
_SECONDS_IF_RAISED = 5.0  # for closures in hand: a worker without data must not hide the error


class Coordinator:
    """Schedules steps on workers, which run asynchronously and in any order.

    Each closure (a call of `schedule`) is applied exactly once at each server, however many
    workers are lost and however often it is tried. Errors are raised by the next `schedule`,
    `join` or `done` (the first one, once) and drop the queue.

    Args:
      strategy: a `ParameterServerStrategy` without another open coordinator.
      queue_size: how many closures may wait before `schedule` blocks; None: 4 per worker.

    Raises:
      TypeError: another kind of strategy.
      ValueError: a strategy with an open coordinator; a queue size that is not positive.

    Example:
      >>> strategy = dj.ParameterServerStrategy(workers=2)
      >>> with strategy.scope():
      ...     total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
      >>> with dj.Coordinator(strategy) as coordinator:
      ...     for x in range(5):
      ...         _ = coordinator.schedule(lambda x: total.assign_add(x), args=(float(x),))
      ...     coordinator.join()
      >>> float(total.value)
      10.0

    Source: tf.distribute.coordinator.ClusterCoordinator.
    """

    def __init__(self, strategy: ParameterServerStrategy, *, queue_size: int | None = None):
        require_outside_of_steps("Coordinator")
        require_servers(strategy)
        if queue_size is None:
            queue_size = _QUEUED_PER_WORKER * strategy.num_workers
        _require_positive(queue_size, "Coordinator", "queue_size", "dj.Coordinator(strategy)")
        self._strategy = strategy
        self._board = strategy.board
        require(
            self._board.open(queue_size),
            "Coordinator needs a strategy that has no other",
            got=f"{strategy!r}, which has one that is open",
            why="two would share its workers' turns and its servers' order",
            fix="use that one, or close it first: coordinator.close()",
        )
        self._before = _add(server.report() for server in strategy.engine.servers)
        self._snapshot: Snapshot | None = None
        self._cursors: weakref.WeakSet[Cursor] = weakref.WeakSet()
        self._board.add_workers(strategy.num_workers)
        self._closing = weakref.finalize(self, self._board.close)

    # -- running steps --------------------------------------------------------

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> RemoteValue:
        """Schedules ``fn(*args, **kwargs)`` on a worker; returns its future result.

        The first call traces and cuts ``fn``, so errors of the trace are raised here. Blocks
        while the queue is full.

        Args:
          fn: a replica function, as for ``strategy.run``.
          args: its positional arguments. An iterator over a per-worker dataset stands for the
            worker's next element, `PerWorkerValues` for the worker's value.
          kwargs: its keyword arguments.
        Context: not in a replica function. Numpy arrays, dicts and lists are copied here.

        Raises:
          ContextError: in a replica function or per-worker data; in ``with coordinator.paused()``,
            a full queue.
          RuntimeError: the coordinator is closed.
          ValueError: a `RemoteValue` among the arguments.
          Exception: the error of an earlier closure; this one is then not queued.
        """
        self._require_ready("schedule")
        self._board.raise_error()
        try:
            closure = cut_call(self._board, self._strategy, fn, args, kwargs)
        except Exception as error:
            keep_user_lines(error)
            raise
        self._board.put(closure, lambda: self._require_ready("schedule"))
        return RemoteValue(closure, self._board)

    def join(self, timeout: float | None = None) -> None:
        """Waits until all closures are over.

        Args:
          timeout: maximum wait in seconds.

        Raises:
          TimeoutError: some are not over by then.
          ContextError: in ``with coordinator.paused()``, a replica function or per-worker data.
          Exception: the error of a closure.
        """
        self._require_ready("join")
        self._board.require_going("join")
        require(
            self._board.waiters.wait_until(self._board.is_empty, timeout),
            f"join needs all closures to end within {timeout} s",
            got=f"{len(self._board.queue)} in the queue and {len(self._board.running)} running",
            why="the workers have not got that far yet",
            fix="wait longer; coordinator.stats() says what workers do",
            error=TimeoutError,
        )
        self._board.raise_error()

    def done(self) -> bool:
        """Returns whether all closures are over; raises as `join` does."""
        self._require_ready("done")
        self._board.raise_error()
        return self._board.is_empty()

    def fetch(self, nest: PyTree) -> Any:
        """Waits, and returns a tree with its RemoteValues replaced by numpy results."""
        is_remote = lambda leaf: isinstance(leaf, RemoteValue)
        return jax.tree.map(
            lambda leaf: leaf.fetch() if is_remote(leaf) else to_numpy(leaf),
            nest,
            is_leaf=is_remote,
        )

    def cancel(self) -> None:
        """Drops the closures that have not begun; those that workers have in hand are run."""
        self._require_ready("cancel", waits=False)
        self._board.cancel("coordinator.cancel() was called before it had run")

    def close(self) -> None:
        """Drops the queue, waits for the closures in hand and ends the threads."""
        require_outside_of_steps("close")
        self._board.require_not_drawing("close")
        self._end(None)

    def _end(self, timeout: float | None) -> None:
        """Closes; waits at most `timeout` seconds for workers to end."""
        if self._closing.alive:
            self._board.cancel("the coordinator was closed before it had run")
        self._closing.detach()
        self._board.close()  # again, if a signal ended the first call before it
        self._board.wait_for_workers(timeout)

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        timeout = _SECONDS_IF_RAISED
        try:
            if kind is None and self._closing.alive:
                self.join()
            timeout = None if kind is None else timeout
        finally:
            self._end(timeout)

    # -- data -----------------------------------------------------------------

    def create_per_worker_dataset(
        self,
        fn_or_dataset: Callable[[InputContext], Iterable[Any]] | Iterable[Any],
        *,
        at: str = "worker",
    ) -> PerWorkerDataset:
        """Returns a dataset from which each worker draws elements for its closures.

        A worker whose data has ended takes no more closures that need it. When the data of all
        workers has ended, such closures raise `EndOfDataError` from `fetch`, and `join` returns.

        Args:
          fn_or_dataset: a function of an `InputContext` (pipeline number and count), called
            for each worker present when an iteration begins, once it needs its first element; or
            a dataset, whose elements go to whichever worker asks next.
          at: where the function is called. "worker": where the worker is (in its process, on
            `RayEngine`: it is pickled, and must give the same elements each time); "coordinator":
            in this process, where a dataset is always read.

        Raises:
          TypeError, ValueError: invalid arguments.
        """
        self._require_ready("create_per_worker_dataset", waits=False)
        require_source(fn_or_dataset, at)
        strategy = self._strategy
        is_there = at == "worker"
        open_data = strategy.engine.open_data if is_there else lambda worker, make: Elements(make)
        num_replicas = strategy.num_replicas_in_sync
        return PerWorkerDataset(
            fn_or_dataset, self._board.worker_ids, num_replicas, open_data, self._cursors
        )

    # -- workers --------------------------------------------------------------

    def add_workers(self, n: int = 1) -> list[int]:
        """Starts more workers; returns their ids."""
        self._require_ready("add_workers", waits=False)
        _require_positive(n, "add_workers", "n", "coordinator.add_workers(2)")
        return self._board.add_workers(n)

    def remove_workers(self, ids_or_n: int | Iterable[int]) -> None:
        """Ends workers after the closures they have in hand, and waits until they have ended.

        The rest of their shares of per-worker data is not drawn: the next ``iter(dataset)``
        shares the data among the workers present then.

        Args:
          ids_or_n: which workers, or how many, the latest first.

        Raises:
          ValueError: an unknown id, or no worker would be left.
        """
        self._require_ready("remove_workers")
        if isinstance(ids_or_n, Iterable):
            ids_or_n = list(dict.fromkeys(ids_or_n))  # here: the board chooses under its lock
        else:
            _require_positive(ids_or_n, "remove_workers", "n", "coordinator.remove_workers(1)")
        self._board.remove_workers(functools.partial(_choose, ids_or_n))

    # -- snapshots ------------------------------------------------------------

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """A context in which no closure runs, so that variables read there are consistent.

        Running closures finish first; the queue is kept, and continues afterwards. A restore in
        another thread waits until the block has ended.

        Example:
          >>> strategy = dj.ParameterServerStrategy(workers=2)
          >>> with strategy.scope():
          ...     w, count = dj.Variable(1.0), dj.Variable(0)
          >>> with dj.Coordinator(strategy) as coordinator, coordinator.paused():
          ...     values = w.value, count.value
        """
        self._require_ready("paused")
        with self._board.paused():
            yield

    def snapshot(self) -> Snapshot:
        """Returns a copy of the state of all servers, between two closures: see `paused`.

        Includes the positions of iterators over per-worker datasets.

        Raises:
          ServerLostError: a server is lost.
        """
        self._require_ready("snapshot")
        with self._board.paused():
            servers = [server.snapshot() for server in self._strategy.engine.servers]
            cursors = tuple(self._cursors)  # another thread may begin an iteration meanwhile
            positions = weakref.WeakKeyDictionary((each, each.position()) for each in cursors)
            strategy = weakref.ref(self._strategy)
            self._snapshot = Snapshot(self._board.num_held, servers, positions, strategy)
        return self._snapshot

    def restore(self, snapshot: Snapshot | None = None) -> int:
        """Restores all servers to a snapshot; returns how many closures it contains.

        The results of closures that it does not contain, including queued and running ones, become
        a `ServerLostError`. If any was not over, the next `join` raises it, once.

        Args:
          snapshot: the snapshot; None: the latest.

        Raises:
          RuntimeError: there is no snapshot.
          TypeError, ValueError: something else, or a snapshot of another strategy.
        """
        self._require_ready("restore")
        if snapshot is not None:
            require_snapshot(snapshot, self._strategy)
        snapshot = snapshot or self._snapshot
        require(
            snapshot is not None,
            "restore needs a snapshot",
            got="none, and none was taken",
            why="servers go back to what they had when it was taken",
            fix="snapshot = coordinator.snapshot(), now and then",
            error=RuntimeError,
        )
        assert snapshot is not None, "as was checked"
        self._board.require_going("restore")
        is_any_lost = not self._board.is_empty()
        with self._board.paused(is_restore=True):
            num_over = self._board.undo(snapshot.closures, is_reported=is_any_lost)
            # From here on, servers reject pushes for any closure from before that.
            for server, saved in zip(self._strategy.engine.servers, snapshot.servers, strict=True):
                server.restore(saved, num_over)
            for cursor, position in snapshot.positions.items():
                cursor.restore(position)
        self._snapshot = snapshot
        return snapshot.closures

    # -- statistics -----------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns statistics, as a dict of numbers.

        closures: how many are scheduled (in total), running, done, failed, cancelled, retried;
        queue; versions: of the servers; staleness: a histogram of the pushes by others between
        a pull and its push; bytes_pulled, bytes_pushed; pushes_per_second; workers; servers.
        """
        board, engine = self._board, self._strategy.engine
        counts = board.counts
        names = ("scheduled", "done", "failed", "cancelled", "retried")
        servers = [(server, server.report()) for server in engine.servers]
        totals = _add(report for _, report in servers)
        totals.subtract(self._before)
        staleness = {k: n for k, n in totals.items() if isinstance(k, int) and n}
        return {
            "closures": {name: counts[name] for name in names} | {"running": len(board.running)},
            "queue": len(board.queue),
            "versions": [report.version for _, report in servers],
            "staleness": dict(sorted(staleness.items())),
            "bytes_pulled": totals["pulled"],
            "bytes_pushed": totals["pushed"],
            "pushes_per_second": sum(staleness.values()) / (time.monotonic() - board.started),
            "workers": board.describe_workers(),
            "servers": [
                {"id": s.number, "pid": s.pid, "version": report.version, "bytes": report.nbytes}
                for s, report in servers
            ],
        }

    def __repr__(self) -> str:
        return f"Coordinator({self._strategy!r})"

    def _require_ready(self, method: str, *, waits: bool = True) -> None:
        """Raises unless a method, which may wait for workers, can be called here and now."""
        require_outside_of_steps(method)
        if waits:
            self._board.require_not_drawing(method)
        require(
            self._closing.alive,
            f"{method} needs an open coordinator",
            got="one that was closed",
            why="its workers have ended",
            fix="coordinator = dj.Coordinator(strategy) opens another",
            error=RuntimeError,
        )


def _add(reports: Iterable[Report]) -> collections.Counter[int | str]:
    """Returns how many pushes had each staleness, and the bytes pulled and pushed."""
    totals: collections.Counter[int | str] = collections.Counter()
    for report in reports:
        totals.update({"pulled": report.bytes_pulled, "pushed": report.bytes_pushed})
        totals.update(report.staleness)
    return totals


# -- its arguments ------------------------------------------------------------


def require_servers(strategy: object) -> None:
    """Raises a TypeError unless it is a strategy that has parameter servers."""
    # A `dj.compat` adapter has all names of the strategy it wraps, and would get another board.
    require(
        isinstance(getattr(strategy, "board", None), Board) and hasattr(type(strategy), "cut_step"),
        "Coordinator needs a ParameterServerStrategy",
        got=describe_value(strategy),
        why="it schedules steps on workers that have parameter servers",
        fix="dj.Coordinator(dj.ParameterServerStrategy(workers=4)); for a dj.compat adapter of "
        "one: dj.Coordinator(strategy.wrapped)",
        error=TypeError,
    )


def require_snapshot(snapshot: object, strategy: ParameterServerStrategy) -> None:
    """Raises a TypeError or ValueError unless it is a snapshot of the servers of `strategy`."""
    is_snapshot = isinstance(snapshot, Snapshot)
    if is_snapshot and snapshot.strategy() is strategy:
        return
    raise (ValueError if is_snapshot else TypeError)(
        message(
            f"restore needs a snapshot of the servers of {strategy!r}",
            got=f"one of another strategy: {snapshot!r}"
            if is_snapshot
            else describe_value(snapshot),
            why="servers go back to the values that they themselves had",
            fix="snapshot = coordinator.snapshot(); dj.checkpoint takes values from one strategy "
            "to another",
        )
    )


def _require_positive(value: object, method: str, name: str, fix: str) -> None:
    why = "it is a number of workers or closures"
    require_int(f"{method}: {name}", value, 1, why=why, fix=fix)


def _choose(ids_or_n: int | list[int], known: list[int]) -> list[int]:
    """Returns the ids of the workers to remove, of those that there are."""
    ids = ids_or_n if isinstance(ids_or_n, list) else known[-ids_or_n:]
    require(
        set(ids) < set(known),
        "remove_workers needs the ids of existing workers, and one worker to remain",
        got=f"{ids_or_n!r}, of the workers {known}",
        why="something has to run what is scheduled",
        fix=f"coordinator.remove_workers([{known[-1]}]), if there are others; "
        "coordinator.close() ends all",
    )
    return ids
