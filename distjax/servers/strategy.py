"""ParameterServerStrategy: variables at servers, steps by workers that do not wait."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from distjax import user_mesh
from distjax.context import frames
from distjax.context.contracts import Destinations
from distjax.errors import describe_value, message
from distjax.integers import is_int
from distjax.modes import VariableAggregation, VariableSynchronization
from distjax.objects.stateful_args import run_here
from distjax.placement.topology import REPLICA_AXIS, local_devices, one_device_topology
from distjax.program.function_cache import FunctionCache
from distjax.replica.arguments import require_call
from distjax.servers.placement import ServerLayout, ServerPlacement
from distjax.servers.server_storage import ServerEngine, ServerLike, ServerStorage
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.strategy import Strategy
from distjax.typing import PositionalArgs, PyTree, VariableModes
from distjax.variables.construct import make_variable
from distjax.variables.policy import AT_SERVER
from distjax.variables.storage import StoredArray
from distjax.variables.stored_variable import StoredVariable
from distjax.variables.variable import Variable

CUTS = ("least_bytes", "arguments")


class ParameterServerExtended(StrategyExtended):
    """The inside of a `ParameterServerStrategy`.

    Args:
      device: where the user's process has what it fetches.
      engine: runs workers and servers.
      num_servers: how many servers there are.
      cut: "least_bytes" or "arguments".
      axis_name: the name of the replica axis in a step.

    Attributes:
      engine: as given.
      cut: as given.
      plans: what steps were cut into.
      tracing: held while a step is traced.
    """

    def __init__(
        self, device: jax.Device, engine: ServerEngine, num_servers: int, cut: str, axis_name: str
    ):
        topology = one_device_topology(device, 1, axis_name)
        self.at_servers = ServerPlacement(num_servers, device)
        super().__init__(topology, self.at_servers, wraps=False)
        self.engine, self.cut = engine, cut
        self.plans = FunctionCache()
        self.tracing = threading.RLock()
        self._numbers = itertools.count()

    @property
    def servers(self) -> Sequence[ServerLike]:
        """The servers."""
        return self.engine.servers

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

    def run_closure(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs ``fn`` once, at some worker, and returns its results."""
        raise NotImplementedError

    # -- variables ------------------------------------------------------------

    @user_mesh.ignores_user_mesh
    def create_variable(
        self, initial_value: PyTree, *, name: str, modes: VariableModes, **options: Any
    ) -> Variable:
        """Makes a variable at a server (called by `Variable`)."""
        _require_modes(modes, name)
        variable = make_variable(
            self.strategy,
            self.placement,
            initial_value,
            name=name,
            modes=modes,
            plain=AT_SERVER,
            **options,
        )
        self.variables.add(variable)
        return variable

    def make_storage(self, variable: StoredVariable) -> StoredArray:
        """Returns what reads and writes the variable's value where it lives."""
        layout = variable.layout
        assert isinstance(layout, ServerLayout), "as its placement says"
        servers = self.servers if layout.server is None else [self.servers[layout.server]]
        key = f"{variable.name}#{next(self._numbers)}"
        return ServerStorage(variable.name, self.variable_lock, key, servers, layout.device)

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Destinations) -> Generator[None]:
        """Makes new variables live at the server of a variable; at every one, for no variable."""
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
    is_one = aggregation is VariableAggregation.SUM
    if synchronization is VariableSynchronization.ON_WRITE or is_one:
        return
    raise ValueError(
        message(
            f"variable {name!r} at a parameter server needs ON_WRITE, or ON_READ with SUM",
            got=f"ON_READ + {aggregation.name}",
            why="workers come and go: there is one value, to which each adds what it has",
            fix="aggregation=dj.VariableAggregation.SUM for totals; synchronization=ON_WRITE for "
            "one value that every worker may set",
        )
    )


class ParameterServerStrategy(Strategy):
    """Variables at servers; workers run steps at the same time, and wait for nobody.

    A step is written for one replica, as for any other strategy, and is cut by itself: what comes
    before a `merge_call` (as an optimizer makes one, and each write of a variable) runs at a
    worker, on the values that the variables had when it began; the merge function runs at the
    servers, on the values that they have then.

    Args:
      workers: how many, on the local devices in turn; or a sequence of devices for each; None:
        one on each local device.
      servers: how many.
      max_staleness: how many writes of others may come between a worker's reading and its
        writing; None: any number.
      engine: runs workers and servers.
      cut: "least_bytes": the worker does what makes the least travel; "arguments": servers do all
        of a merge, so that one closure at a time gives the bits of `OneDeviceStrategy`.
      axis_name: the name of the replica axis in a step (of size 1).

    Raises:
      ValueError: numbers below 1, devices that are none, an unknown `cut`.

    Source: tf.distribute.experimental.ParameterServerStrategy (TF 2).
    """

    def __init__(
        self,
        workers: int | Sequence[Sequence[jax.Device]] | None = None,
        servers: int = 1,
        *,
        max_staleness: int | None = None,
        engine: ServerEngine,
        cut: str = "least_bytes",
        axis_name: str = REPLICA_AXIS,
    ):
        _require_count(servers, "servers")
        _require_staleness(max_staleness)
        _require_cut(cut)
        self.worker_devices = _as_workers(workers)
        self.max_staleness = max_staleness
        self.engine = engine
        devices = local_devices()
        engine.start(
            [each[0] for each in self.worker_devices],
            [devices[i % len(devices)] for i in range(servers)],
            max_staleness,
        )
        device = devices[0]
        super().__init__(ParameterServerExtended(device, engine, servers, cut, axis_name))

    @property
    def extended(self) -> ParameterServerExtended:
        """The methods for algorithms that need to be distribution-aware."""
        assert isinstance(self._extended, ParameterServerExtended)
        return self._extended

    @property
    def num_workers(self) -> int:
        """How many workers there are at the start."""
        return len(self.worker_devices)

    @property
    def servers(self) -> Sequence[ServerLike]:
        """The servers."""
        return self.engine.servers

    def __repr__(self) -> str:
        return f"ParameterServerStrategy(workers={self.num_workers}, servers={len(self.servers)})"


def _as_workers(
    workers: int | Sequence[Sequence[jax.Device]] | None,
) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns the devices of each worker."""
    devices = local_devices()
    if workers is None:
        return tuple((device,) for device in devices)
    if isinstance(workers, int):
        _require_count(workers, "workers")
        return tuple((devices[i % len(devices)],) for i in range(workers))
    each = [tuple(w) for w in workers] if isinstance(workers, (list, tuple)) else []
    if each and all(len(w) == 1 and isinstance(w[0], jax.Device) for w in each):
        return tuple(each)
    raise ValueError(
        message(
            "ParameterServerStrategy: workers needs a number, or a sequence of one device for each",
            got=describe_value(workers),
            why="each worker is a replica on a device of its own",
            fix="dj.ParameterServerStrategy(workers=[[d] for d in jax.devices()])",
        )
    )


def _require_count(value: object, name: str) -> None:
    if is_int(value) and value >= 1:
        return
    raise ValueError(
        message(
            f"ParameterServerStrategy: {name} needs a positive int",
            got=describe_value(value),
            why="a step needs a worker to run at, and a server for its variables",
            fix=f"dj.ParameterServerStrategy({name}=2)",
        )
    )


def _require_staleness(value: object) -> None:
    if value is None or (is_int(value) and value >= 0):
        return
    raise ValueError(
        message(
            "ParameterServerStrategy: max_staleness needs None or an int of 0 or more",
            got=describe_value(value),
            why="it bounds how many writes come between a worker's reading and its writing",
            fix="dj.ParameterServerStrategy(max_staleness=4); 0 is one step at a time",
        )
    )


def _require_cut(value: object) -> None:
    if value in CUTS:
        return
    raise ValueError(
        message(
            f"ParameterServerStrategy: cut needs one of {', '.join(map(repr, CUTS))}",
            got=describe_value(value),
            why="it says which part of a merge the worker does",
            fix="dj.ParameterServerStrategy(cut='arguments') for the bits of OneDeviceStrategy",
        )
    )
