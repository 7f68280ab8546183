"""The default strategy: ordinary behavior, one replica, nothing wrapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from distjax._src.collectives.ops import as_reduce_op
from distjax._src.context import Destinations, Frame, frames, without_expectations
from distjax._src.data import dataset as datasets
from distjax._src.data.options import ERROR, InputContext, InputOptions, as_input_options
from distjax._src.placement import (
    REPLICA_AXIS,
    Topology,
    local_devices,
    one_device_topology,
)
from distjax._src.replica.arguments import require_call, require_callable, unmark
from distjax._src.replica.contexts import DefaultReplicaContext
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.reducing import require_pairs
from distjax._src.strategies.strategy import Strategy
from distjax._src.typing import DatasetLike, PositionalArgs, PyTree, ReduceOpLike
from distjax._src.variables.layouts import PlainPlacement
from distjax._src.variables.variable import Variable
from distjax.errors import UnsupportedError, message


class _Lacking:
    """In the place of a property that only strategies with devices have: raises."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise UnsupportedError(_no_devices_text(self._name))


class DefaultExtended(StrategyExtended):
    """Runs functions as they are: nothing is traced, wrapped or placed."""

    is_default = True
    worker_devices: Any = _Lacking()
    parameter_devices: Any = _Lacking()
    between_graph: Any = _Lacking()
    should_init: Any = _Lacking()

    def __init__(self) -> None:
        super().__init__(None, PlainPlacement(), wraps=False)

    @property
    def topology(self) -> Topology:
        """One replica on the default device.

        Looked up on demand: importing distjax must not start a backend.
        """
        return one_device_topology(local_devices()[0], 1, REPLICA_AXIS)

    @property
    def num_replicas(self) -> int:
        """Always 1."""
        return 1

    @property
    def public_axis_name(self) -> None:
        """None: there is no replica axis, since `run` calls the function directly."""
        return None

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``fn`` in a fresh replica context."""
        args, kwargs = require_call(fn, args, kwargs, "run")
        frames.require_cross_replica(self.strategy, "run")
        frame = Frame(
            self.strategy, DefaultReplicaContext(self.strategy), state=frames.current().state
        )
        args, kwargs = without_expectations(args, kwargs)
        with frames.with_frame(frame):
            args, kwargs = unmark((args, kwargs))
            return fn(*args, **kwargs)

    def place_arguments(self, tree: PyTree) -> Any:
        """Returns `tree` unchanged: functions run where their arguments are."""
        return tree

    def reduce_to(self, op: ReduceOpLike, value: PyTree, destinations: Destinations) -> Any:
        """Returns `value` unchanged: there is only one replica."""
        as_reduce_op(op)
        frames.require_cross_replica(self.strategy, "reduce_to")
        return value

    def batch_reduce_to(
        self, op: ReduceOpLike, value_destination_pairs: Sequence[tuple[PyTree, Destinations]]
    ) -> list[Any]:
        """Returns the values unchanged: there is only one replica."""
        as_reduce_op(op)
        frames.require_cross_replica(self.strategy, "batch_reduce_to")
        return [value for value, _ in require_pairs(value_destination_pairs)]

    def broadcast_to(self, value: PyTree, destinations: Destinations = None) -> NoReturn:
        """Raises: there is nothing to broadcast to."""
        frames.require_cross_replica(self.strategy, "broadcast_to")
        raise UnsupportedError(_no_devices_text("broadcast_to"))

    def distribute_dataset(self, dataset: DatasetLike, options: InputOptions | None = None) -> Any:
        """Returns `dataset` itself, unless a plain loop over it would do something else."""
        frames.require_cross_replica(self.strategy, "distribute_dataset")
        is_plain = datasets.loops_plainly(dataset)
        if is_plain and as_input_options(options, "distribute_dataset").partial == ERROR:
            return dataset
        return datasets.distribute_dataset(None, dataset, options)

    def distribute_datasets_from_function(
        self, fn: Callable[[Any], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns ``fn(InputContext())``, or drops or pads its smaller elements."""
        frames.require_cross_replica(self.strategy, "distribute_datasets_from_function")
        options = as_input_options(options, "distribute_datasets_from_function")
        if options.partial == ERROR:
            require_callable(fn, "distribute_datasets_from_function")
            return fn(InputContext())
        return datasets.distribute_datasets_from_function(None, fn, options)

    def update_frame(self) -> Frame:
        """Returns the current frame, marked as an update; the context stays the same."""
        return dataclasses.replace(frames.current(), in_update=True)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Destinations:
        """Returns the first variable by name; all others live on its device."""
        return min(var_list, key=lambda v: v.name, default=self.topology.devices)


def _no_devices_text(what: str) -> str:
    return message(
        f"{what} needs a strategy that has devices",
        got="the default strategy",
        why="it is for code that does not use strategies, and leaves placement to JAX",
        fix="strategy = dj.OneDeviceStrategy(); with strategy.scope(): ...",
    )


class DefaultStrategy(Strategy):
    """The active strategy when none was chosen; `dj.get_strategy()` returns it."""

    def __init__(self) -> None:
        super().__init__(DefaultExtended())

    def __repr__(self) -> str:
        return "DefaultStrategy()"


DEFAULT_STRATEGY = DefaultStrategy()
frames.set_default_frame(
    Frame(DEFAULT_STRATEGY, DefaultReplicaContext(DEFAULT_STRATEGY), allows_both=True)
)
