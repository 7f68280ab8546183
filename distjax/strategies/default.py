"""The default strategy: ordinary behaviour, one replica, nothing wrapped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from distjax.collectives.ops import as_reduce_op
from distjax.context import frames
from distjax.context.frames import Frame
from distjax.data import dataset as datasets
from distjax.data.input_context import InputContext
from distjax.data.options import ERROR, as_input_options
from distjax.errors import UnsupportedError, message
from distjax.placement.topology import REPLICA_AXIS, Topology, local_devices, one_device_topology
from distjax.replica.arguments import require_call, require_callable
from distjax.replica.default_context import DefaultReplicaContext
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.reducing import require_pairs
from distjax.strategies.strategy import Strategy
from distjax.variables.variable import Variable
from distjax.variables.variable_placement import PlainPlacement


class DefaultExtended(StrategyExtended):
    """Runs functions as they are: nothing is traced, wrapped or placed."""

    is_default = True

    def __init__(self) -> None:
        super().__init__(None, PlainPlacement(), wraps=False)

    @property
    def topology(self) -> Topology:
        """One replica on the default device.

        Looked up when needed: importing distjax must not start a backend.
        """
        return one_device_topology(local_devices()[0], 1, REPLICA_AXIS)

    @property
    def num_replicas(self) -> int:
        """Always 1."""
        return 1

    @property
    def public_axis_name(self) -> None:
        """There is no replica axis: `run` calls the function as it is."""
        return None

    @property
    def worker_devices(self) -> NoReturn:
        """Raises: the default strategy has no devices of its own."""
        raise UnsupportedError(_no_devices_text("worker_devices"))

    @property
    def parameter_devices(self) -> NoReturn:
        """Raises: the default strategy has no devices of its own."""
        raise UnsupportedError(_no_devices_text("parameter_devices"))

    @property
    def between_graph(self) -> NoReturn:
        """Raises: a matter of strategies with replicas."""
        raise UnsupportedError(_no_devices_text("between_graph"))

    @property
    def should_init(self) -> NoReturn:
        """Raises: a matter of strategies with replicas."""
        raise UnsupportedError(_no_devices_text("should_init"))

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Returns the first variable by name, on whose device all others are."""
        return min(var_list, key=lambda v: v.name, default=self.topology.devices)

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls ``fn`` in a fresh replica context."""
        args, kwargs = require_call(fn, args, kwargs, "run")
        frames.require_cross_replica(self.strategy, "run")
        frame = Frame(
            self.strategy, DefaultReplicaContext(self.strategy), state=frames.current().state
        )
        with frames.with_frame(frame):
            return fn(*args, **kwargs)

    def place_arguments(self, tree: Any) -> Any:
        """Returns `tree`: functions run where their arguments are."""
        return tree

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Returns `dataset` itself, unless smaller batches are to be dropped or padded."""
        frames.require_cross_replica(self.strategy, "distribute_dataset")
        if as_input_options(options, "distribute_dataset").partial == ERROR:
            return dataset
        return datasets.distribute_dataset(None, dataset, options)

    def distribute_datasets_from_function(
        self, fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Returns ``fn(InputContext())``, unless smaller elements are to be dropped or padded."""
        frames.require_cross_replica(self.strategy, "distribute_datasets_from_function")
        options = as_input_options(options, "distribute_datasets_from_function")
        if options.partial == ERROR:
            require_callable(fn, "distribute_datasets_from_function")
            return fn(InputContext())
        return datasets.distribute_datasets_from_function(None, fn, options)

    def reduce_to(self, op: Any, value: Any, destinations: Any) -> Any:
        """Returns `value`: there is one replica."""
        as_reduce_op(op)
        frames.require_cross_replica(self.strategy, "reduce_to")
        return value

    def batch_reduce_to(self, op: Any, value_destination_pairs: Any) -> list[Any]:
        """Returns the values: there is one replica."""
        pairs = require_pairs(value_destination_pairs)
        return [self.reduce_to(op, value, destinations) for value, destinations in pairs]

    def broadcast_to(self, value: Any, destinations: Any = None) -> NoReturn:
        """Raises: there is nothing to broadcast to."""
        frames.require_cross_replica(self.strategy, "broadcast_to")
        raise UnsupportedError(_no_devices_text("broadcast_to"))


def _no_devices_text(what: str) -> str:
    return message(
        f"{what} needs a strategy that has devices",
        got="the default strategy",
        why="it stands for code that knows nothing of strategies and leaves placement to JAX",
        fix="strategy = dj.OneDeviceStrategy(); with strategy.scope(): ...",
    )


class DefaultStrategy(Strategy):
    """The active strategy where none was chosen. Got by `dj.get_strategy()`."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended())

    def __repr__(self) -> str:
        return "DefaultStrategy()"


DEFAULT_STRATEGY = DefaultStrategy()
_frame = Frame(DEFAULT_STRATEGY, DefaultReplicaContext(DEFAULT_STRATEGY), is_default=True)
frames.set_default_frame(lambda: _frame)
