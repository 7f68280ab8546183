"""The default strategy: ordinary behavior, one replica, nothing wrapped."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import jax

from distjax.collectives.ops import as_reduce_op
from distjax.collectives.reductions import DEFAULT_OPTIONS
from distjax.context import frames
from distjax.context.contracts import Destinations
from distjax.context.expectation import without_expectations
from distjax.context.frames import Frame
from distjax.data import dataset as datasets
from distjax.data.input_context import InputContext
from distjax.data.options import ERROR, InputOptions, as_input_options
from distjax.errors import UnsupportedError, message
from distjax.placement.topology import REPLICA_AXIS, Topology, local_devices, one_device_topology
from distjax.program.function_cache import FunctionCache
from distjax.replica.arguments import require_call, require_callable, unmark
from distjax.replica.contexts import DefaultReplicaContext
from distjax.strategies import colocation, reducing, update, values
from distjax.strategies.component_registry import ComponentRegistry
from distjax.strategies.reducing import require_pairs
from distjax.strategies.steps import MultiStepContext, make_steps_program, run_steps
from distjax.strategies.strategy import Strategy
from distjax.typing import AxisLike, DatasetLike, PositionalArgs, PyTree, ReduceOpLike
from distjax.variables.construct import copy_variable, make_variable
from distjax.variables.storage import StoredArray, VariableLock
from distjax.variables.stored_variable import OwningStrategy, StoredVariable
from distjax.variables.variable import Variable
from distjax.variables.variable_placement import PlainPlacement


class DefaultExtended:
    """Runs functions as they are: nothing is traced, wrapped or placed.

    The methods are documented in `StrategyExtended`, whose contract this class shares.
    """

    is_default = compiles = True
    wraps = False
    axis_name = REPLICA_AXIS
    communication = DEFAULT_OPTIONS
    require_static_shapes = False
    should_checkpoint = should_save_summary = True
    strategy: OwningStrategy

    def __init__(self) -> None:
        self.placement = PlainPlacement()
        self.step_programs = FunctionCache(functools.partial(make_steps_program, self))
        self.variables: weakref.WeakSet[Variable] = weakref.WeakSet()
        self._containers = ComponentRegistry()
        self.variable_lock = VariableLock()

    def bind(self, strategy: OwningStrategy) -> None:
        """Sets the Strategy that owns this object."""
        self.strategy = strategy

    # -- devices, and what the default strategy lacks ---------------------------

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
        """Raises: it applies only to strategies with replicas."""
        raise UnsupportedError(_no_devices_text("between_graph"))

    @property
    def should_init(self) -> NoReturn:
        """Raises: it applies only to strategies with replicas."""
        raise UnsupportedError(_no_devices_text("should_init"))

    # -- replicas and what they hold ------------------------------------------

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

    def reduce(
        self, op: ReduceOpLike, value: PyTree, axis: AxisLike = None, mask: PyTree = None
    ) -> Any:
        """Reduces over the one replica, and over `axis`."""
        frames.require_cross_replica(self.strategy, "reduce")
        return reducing.reduce(self, op, value, axis, mask)

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
        pairs = require_pairs(value_destination_pairs)
        return [self.reduce_to(op, value, destinations) for value, destinations in pairs]

    def broadcast_to(self, value: PyTree, destinations: Destinations = None) -> NoReturn:
        """Raises: there is nothing to broadcast to."""
        frames.require_cross_replica(self.strategy, "broadcast_to")
        raise UnsupportedError(_no_devices_text("broadcast_to"))

    def gather(self, value: PyTree, axis: int) -> Any:
        """Returns the value of the one replica, after the usual checks."""
        frames.require_cross_replica(self.strategy, "gather")
        return reducing.gather(self, value, axis)

    def local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Returns `value` as the one replica's result."""
        return (value,)

    # -- input ----------------------------------------------------------------

    def distribute_values_from_function(self, fn: Callable[[Any], Any]) -> Any:
        """Returns ``fn(ValueContext())``."""
        return values.values_from_function(self, fn)

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

    def run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Iterator[PyTree],
        iterations: int = 1,
        initial_loop_values: Mapping[str, PyTree] | None = None,
    ) -> MultiStepContext:
        """Runs K steps as one compiled loop."""
        frames.require_cross_replica(self.strategy, "run_steps_on_iterator")
        return run_steps(self, fn, iterator, iterations, initial_loop_values)

    # -- variables ------------------------------------------------------------

    def create_variable(self, initial_value: PyTree, **options: Any) -> Variable:
        """Creates a variable and leaves its placement to JAX."""
        variable = make_variable(self.strategy, self.placement, initial_value, **options)
        self.variables.add(variable)
        return variable

    def make_storage(self, variable: StoredVariable) -> StoredArray:
        """Returns the storage for the array of a new variable."""
        return StoredArray(variable.name, self.variable_lock)

    def copy_variable(self, variable: StoredVariable) -> Variable:
        """Returns a new variable with a copy of the value (for deepcopy)."""
        made = copy_variable(variable)
        self.variables.add(made)
        return made

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(var, *args, **kwargs)``."""
        frames.require_cross_replica(self.strategy, "update")
        args, kwargs = require_call(fn, args, kwargs, "update")
        return update.update(self, var, fn, args, kwargs, group)

    def update_non_slot(
        self,
        colocate_with: Destinations,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(*args, **kwargs)``."""
        frames.require_cross_replica(self.strategy, "update_non_slot")
        args, kwargs = require_call(fn, args, kwargs, "update_non_slot")
        return update.update_non_slot(self, colocate_with, fn, args, kwargs, group)

    def update_frame(self) -> Frame:
        """Returns the current frame, marked as an update; the context stays the same."""
        return dataclasses.replace(frames.current(), in_update=True)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Destinations:
        """Returns the first variable by name; all others live on its device."""
        return min(var_list, key=lambda v: v.name, default=self.topology.devices)

    def colocate_vars_with(
        self, colocate_with_variable: Destinations
    ) -> AbstractContextManager[None]:
        """Returns a context that changes nothing: all variables live in one place."""
        return colocation.colocate(self, colocate_with_variable)

    def pause_writers(self) -> AbstractContextManager[None]:
        """Returns a context that changes nothing: no other thread writes."""
        return contextlib.nullcontext()

    def read_var(self, v: Variable) -> jax.Array:
        """Returns the value of `v`."""
        update.require_variable(v, "read_var")
        return v.value

    def value_container(self, value: PyTree) -> Any:
        """Returns the variable of which `value` is the one component, else `value` itself."""
        return self._containers.container_of(value)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Returns whether `v` belongs to the default strategy."""
        update.require_variable(v, "variable_created_in_scope")
        return v.strategy is self.strategy

    def split_components(
        self, variable: StoredVariable, stored: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Returns the one component of a variable."""
        self._containers.remember(variable, (stored,))
        return (stored,)


def _no_devices_text(what: str) -> str:
    return message(
        f"{what} needs a strategy that has devices",
        got="the default strategy",
        why="it stands for code that knows nothing of strategies and leaves placement to JAX",
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
