"""ParameterServerStrategy: variables at servers, and workers that do not wait for each other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distjax._src import user_mesh
from distjax._src.context import Destinations, frames
from distjax._src.objects.stateful import run_here
from distjax._src.placement import (
    REPLICA_AXIS,
    Topology,
    local_devices,
    mesh_topology,
    one_device_topology,
    take_local,
)
from distjax._src.replica.arguments import require_call
from distjax._src.servers.board import Board
from distjax._src.servers.coordinator import run_step
from distjax._src.servers.cutting.description import CutDescription, describe_plan
from distjax._src.servers.cutting.plans import Cutter
from distjax._src.servers.engine import Engine, ThreadEngine
from distjax._src.servers.plan import StepPlan, lower, shardings_of
from distjax._src.servers.server import ParameterServer
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
from distjax._src.variables.partitioners import Partitioner, require_partitioner
from distjax._src.variables.storage import StoredArray
from distjax._src.variables.variable import Variable
from distjax.errors import describe_value, is_int, require, require_int


class ParameterServerExtended(StrategyExtended):
    """The `extended` of a `ParameterServerStrategy`.

    Args:
      topology: the replicas of a worker, all on the device where the user's process gets values.
      board: of its closures; its engine runs workers and servers.
      num_servers: how many servers there are.
      partitioner: says into how many shards a variable is split; None: none is split.
      cut: "least_bytes" or "arguments".
      run_closure: runs a function with its arguments as one closure, and waits for its result.

    Attributes:
      board: as given.
      cutter: cuts steps.
    """

    def __init__(
        self,
        topology: Topology,
        board: Board,
        num_servers: int,
        partitioner: Partitioner | None,
        cut: str,
        run_closure: Callable[[Callable[..., Any], PositionalArgs, dict[str, Any]], Any],
    ):
        (device,) = topology.devices
        self.at_servers = ServerPlacement(num_servers, device, partitioner)
        self._device = device
        super().__init__(topology, self.at_servers, wraps=topology.num_replicas > 1)
        self.board = board
        self.run_closure = run_closure
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
        return self.run_closure(fn, args, kwargs)

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
        homes = self._homes = _as_homes(_as_workers(workers), axis_name)
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
        run_closure = functools.partial(run_step, self)
        super().__init__(
            ParameterServerExtended(topology, self.board, servers, partitioner, cut, run_closure)
        )

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

    def describe_cut(
        self, fn: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None
    ) -> CutDescription:
        """Returns a description of what a step is cut into, for `dj.explain`."""
        plan, _ = self.cut_step(fn, args, kwargs)
        return describe_plan(plan, list(self.extended.variables))

    def lower_worker(
        self, fn: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None
    ) -> list[jax.stages.Lowered]:
        """Returns the programs that a worker with several devices runs, lowered for worker 0."""
        plan, _ = self.cut_step(fn, args, kwargs)
        return _lower_parts(plan, self._homes[0])

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


@user_mesh.ignores_user_mesh
def _lower_parts(plan: StepPlan, home: Topology) -> list[jax.stages.Lowered]:
    """Returns a worker's programs, lowered for its devices; none for a worker with one device."""
    stages = plan.stages if home.mesh is not None else ()
    return [lower(stage.program, *shardings_of(stage, plan, home)) for stage in stages]


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


def _as_homes(workers: Sequence[Sequence[jax.Device]], axis_name: str) -> list[Topology]:
    """Returns where each worker runs its replicas."""
    if len(workers[0]) == 1:
        return [one_device_topology(device, 1, axis_name) for (device,) in workers]
    return [mesh_topology(devices, axis_name) for devices in workers]


def _require_count(value: object, name: str) -> None:
    why = "a step needs a worker to run at, and a server for its variables"
    fix = f"dj.ParameterServerStrategy({name}=2)"
    require_int(f"ParameterServerStrategy: {name}", value, 1, why=why, fix=fix)
