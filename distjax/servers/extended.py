"""`extended` of a ParameterServerStrategy: variables at servers, steps as closures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from distjax import user_mesh
from distjax.context import frames
from distjax.context.contracts import Destinations, StrategyLike
from distjax.errors import message
from distjax.modes import VariableAggregation, VariableSynchronization
from distjax.objects.stateful_args import run_here
from distjax.placement.topology import Topology
from distjax.program.function_cache import FunctionCache
from distjax.program.retraces import record_new_function
from distjax.replica.call_checks import require_call
from distjax.servers.engine import Engine, ServerStrategy
from distjax.servers.plan import Cuts
from distjax.servers.server import ParameterServer
from distjax.servers.storage import ServerPlacement, ServerStorage, make_parts
from distjax.servers.worker_threads import board_of
from distjax.strategies.extended import StrategyExtended
from distjax.typing import PositionalArgs, PyTree, VariableModes
from distjax.variables.construct import make_variable
from distjax.variables.partitioners import Partitioner
from distjax.variables.policy import policy_at_servers
from distjax.variables.storage import StoredArray
from distjax.variables.stored_variable import StoredVariable
from distjax.variables.variable import Variable


class ServedStrategy(StrategyLike, Protocol):
    """A strategy whose `extended` is a `ParameterServerExtended`."""

    @property
    def extended(self) -> ParameterServerExtended:
        """Its variables, servers and cuts."""
        ...


class ParameterServerExtended(StrategyExtended):
    """The `extended` of a `ParameterServerStrategy`.

    Args:
      topology: the replicas of a worker, all on the device where the user's process gets values.
      engine: runs workers and servers.
      num_servers: how many servers there are.
      partitioner: says into how many shards a variable is split; None: none is split.
      cut: "least_bytes" or "arguments".
      run_closure: runs a function with its arguments as one closure, and waits for its result.

    Attributes:
      engine: as given.
      cut: as given.
      cuts: what each step was cut into.
      tracing: held while a step is traced.
    """

    def __init__(
        self,
        topology: Topology,
        engine: Engine,
        num_servers: int,
        partitioner: Partitioner | None,
        cut: str,
        run_closure: Callable[[Callable[..., Any], PositionalArgs, dict[str, Any]], Any],
    ):
        (device,) = topology.devices
        self.at_servers = ServerPlacement(num_servers, device, partitioner)
        self._device = device
        super().__init__(topology, self.at_servers, wraps=topology.num_replicas > 1)
        self.engine, self.cut = engine, cut
        self.run_closure = run_closure
        self.cuts = FunctionCache(lambda fn: Cuts(record_new_function(fn(), self.strategy)))
        self.tracing = threading.RLock()
        self._numbers = itertools.count()

    @property
    def servers(self) -> Sequence[ParameterServer]:
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

    def pause_writers(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which no closure runs."""
        strategy: object = self.strategy
        assert isinstance(strategy, ServerStrategy), "this is the inside of one"
        return board_of(strategy).paused()

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
            find_policy=functools.partial(policy_at_servers, num_replicas=self.num_replicas),
            **options,
        )
        self.variables.add(variable)
        return variable

    def make_storage(self, variable: StoredVariable) -> StoredArray:
        """Returns what reads and writes the variable's value where it lives."""
        parts = make_parts(variable, next(self._numbers))
        return ServerStorage(
            variable.name, self.variable_lock, parts, self.servers, self.at_servers, self._device
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
    if not is_on_read or aggregation is VariableAggregation.SUM:
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
