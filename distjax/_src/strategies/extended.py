"""StrategyExtended: the contract behind every strategy, assembled from parts."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
from jax.sharding import Mesh

from distjax._src import hooks, jax_compat, user_mesh
from distjax._src.collectives.reductions import CommunicationOptions, as_communication_options
from distjax._src.context import Destinations, Frame, frames
from distjax._src.data import dataset as datasets
from distjax._src.data.options import InputOptions
from distjax._src.objects.stateful import run_here
from distjax._src.placement import Topology, holds_noted, in_force
from distjax._src.program.functions import FunctionCache
from distjax._src.program.jit import make_run_program, place_arguments
from distjax._src.replica.arguments import require_call
from distjax._src.strategies import reducing, updating, values
from distjax._src.strategies.steps import MultiStepContext, make_steps_program, run_steps
from distjax._src.typing import AxisLike, DatasetLike, PositionalArgs, PyTree, ReduceOpLike
from distjax._src.variables.construct import copy_variable, make_variable
from distjax._src.variables.layouts import MirroredPlacement, VariablePlacement
from distjax._src.variables.storage import StoredArray, VariableLock, make_storage
from distjax._src.variables.variable import OwningStrategy, Variable

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Method = Callable[Concatenate["StrategyExtended", _P], _R]


def _off_user_mesh(method: _Method[_P, _R]) -> _Method[_P, _R]:
    """Wraps a method so that a mesh set by the user does not apply to the strategy's own arrays."""

    @functools.wraps(method)
    def call(self: StrategyExtended, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self.is_default or not user_mesh.has_user_mesh():
            return method(self, *args, **kwargs)
        return user_mesh.ignores_user_mesh(functools.partial(method, self))(*args, **kwargs)

    return call


def _cross_replica(method: _Method[_P, _R]) -> _Method[_P, _R]:
    """Wraps a method that needs cross-replica context of the strategy, or the default context."""
    name, off_mesh = method.__name__, _off_user_mesh(method)

    @functools.wraps(method)
    def call(self: StrategyExtended, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        frames.require_cross_replica(self.strategy, name)
        call = off_mesh if user_mesh.has_user_mesh() else method
        return call(self, *args, **kwargs)

    return call


class StrategyExtended:
    """Methods for algorithms that need to be distribution-aware.

    Args:
      topology: devices, mesh and replicas; None if a subclass looks them up.
      placement: which layout each variable gets.
      communication: how `reduce_to` and optimizers reduce.
      wraps: whether differing values are returned as PerReplica; a strategy
        of one replica on one device returns bare values.

    Attributes:
      strategy: the Strategy that owns this object.
      variables: the strategy's live variables, held weakly.
      variable_lock: held while arrays of these variables move or are donated.
      require_static_shapes: whether all batches need one shape; False: a new shape recompiles.
      between_graph: whether several processes each run the user's file.
      should_init: whether this process initializes variables: every one does.
      should_checkpoint, should_save_summary: whether this process writes these for all.

    Source: tf.distribute.StrategyExtended (TF 1.13, 1.15).
    """

    is_default = False
    require_static_shapes = between_graph = False
    compiles = should_init = should_checkpoint = should_save_summary = True
    strategy: OwningStrategy

    def __init__(
        self,
        topology: Topology | None,
        placement: VariablePlacement,
        *,
        communication: CommunicationOptions | None = None,
        wraps: bool = True,
    ):
        self._topology, self._placement = topology, placement
        self.communication = as_communication_options(communication)
        if topology is not None:
            self.communication.require_equal_hosts(topology.num_replicas)
            for told in hooks.on_topology:
                told(topology, self.communication.devices_per_host)
            self.between_graph = topology.spans_processes
            self.should_checkpoint = self.should_save_summary = topology.is_on_first_process
        self.wraps = wraps
        self._run_programs = FunctionCache(functools.partial(make_run_program, self))
        self.variable_lock = VariableLock()
        self.step_programs = FunctionCache(functools.partial(make_steps_program, self))
        self.variables: weakref.WeakSet[Variable] = weakref.WeakSet()

    def bind(self, strategy: OwningStrategy) -> None:
        """Sets the Strategy that owns this object; called once, by Strategy."""
        self.strategy = strategy

    @property
    def topology(self) -> Topology:
        """Devices, mesh and replicas."""
        assert self._topology is not None, "a subclass without a topology overrides this"
        return in_force(self._topology)

    @property
    def users_mesh(self) -> Mesh | None:
        """The mesh that the user's code names: that of the strategy, where others stand in too."""
        return (self._topology or self.topology).users_mesh

    @property
    def placement(self) -> VariablePlacement:
        """Where variables live."""
        topology = self._topology
        if topology is None or (now := in_force(topology)) is topology:
            return self._placement
        splits = getattr(self._placement, "over", None)
        return MirroredPlacement(now) if splits is None else splits(now)

    @property
    def num_replicas(self) -> int:
        """R."""
        return self.topology.num_replicas

    @property
    def axis_name(self) -> str:
        """The name of the replica axis in a replica function."""
        return self.topology.axis_name

    @property
    def public_axis_name(self) -> str | None:
        """The axis name that user code may use in `run`; None if there is none."""
        return self.topology.axis_name

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process that run replicas, in replica order."""
        return self.topology.local_devices

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices of this process that hold variables."""
        # Those that an optimizer keeps, also where `dj.check` lets other replicas stand in.
        return (self._topology or self.topology).local_devices

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``fn`` on every replica: see `Strategy.run`."""
        if type(args) is not tuple or kwargs is not None or not callable(fn):
            args, kwargs = require_call(fn, args, kwargs, "run")
        if frames.stack():  # else this is the default context, which allows all
            frame = frames.current()
            if not frame.allows_both:
                frames.require_enterable(self.strategy, "run")
            if frame.state is not None:
                return run_here(self.strategy, fn, args, kwargs or {}, frame.state)
        program = self._run_programs.get(fn)
        if jax_compat.tracing() or (  # no layout of an array tells
            self.topology.mesh is None and holds_noted((args, kwargs))
        ):
            program.require(args, kwargs or {})
        return program.call(args, kwargs or {})

    def place_arguments(self, tree: PyTree) -> Any:
        """Returns the arguments of `run` with arrays from elsewhere moved to the devices."""
        return place_arguments(self.topology, tree)

    # -- cross-replica operations ---------------------------------------------

    @_cross_replica
    def reduce(
        self, op: ReduceOpLike, value: PyTree, axis: AxisLike = None, mask: PyTree = None
    ) -> Any:
        """Reduces over the replicas: see `Strategy.reduce`."""
        return reducing.reduce(self, op, value, axis, mask)

    @_cross_replica
    def reduce_to(self, op: ReduceOpLike, value: PyTree, destinations: Destinations) -> Any:
        """Returns `value` reduced over the replicas, on `destinations`.

        Args:
          op: a ReduceOp or its name.
          value: a tree of PerReplica or Mirrored values.
          destinations: a variable, an array or PerReplica (its devices), a jax.Device, a
            sequence of them, or None (all workers).

        Locality: T in; V(destination) or M out. Context: cross-replica, default.
        Cost: one all-reduce per value.

        Raises:
          ValueError, LocalityError: as for `Strategy.reduce`; ValueError: no destination.
        Source: tf.distribute.StrategyExtended.reduce_to (TF 1.13).
        """
        pairs = [(value, destinations)]
        return reducing.batch_reduce_to(self, op, pairs, self.communication)[0]

    @_cross_replica
    def batch_reduce_to(
        self, op: ReduceOpLike, value_destination_pairs: Sequence[tuple[PyTree, Destinations]]
    ) -> list[Any]:
        """Returns `reduce_to` results, reduced together as `communication` says.

        Args:
          op: a ReduceOp or its name.
          value_destination_pairs: a sequence of (value, destinations).

        Locality, Context: as for `reduce_to`. Cost: one all-reduce per pack.

        Raises:
          ValueError: an element that is not a pair; otherwise as for `reduce_to`.
        Source: tf.distribute.StrategyExtended.batch_reduce_to (TF 1.13).
        """
        return reducing.batch_reduce_to(self, op, value_destination_pairs, self.communication)

    @_cross_replica
    def broadcast_to(self, value: PyTree, destinations: Destinations = None) -> Any:
        """Returns a copy of `value` on `destinations` (None: all workers).

        Args:
          value: a tree of arrays, numbers or variables.
          destinations: as in `reduce_to`.

        Locality: unplaced or M in; M or V(destination) out. Context: cross-replica or default.
        Source: tf.distribute.StrategyExtended.broadcast_to (TF 1.13).

        Raises:
          LocalityError: a PerReplica.
        """
        return reducing.broadcast_to(self, value, destinations)

    @_cross_replica
    def gather(self, value: PyTree, axis: int) -> Any:
        """Concatenates over the replicas: see `Strategy.gather`."""
        return reducing.gather(self, value, axis)

    @_off_user_mesh
    def local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Takes values apart: see `Strategy.local_results`."""
        return values.local_results(self, value)

    @_off_user_mesh
    def distribute_values_from_function(self, fn: Callable[[Any], Any]) -> Any:
        """Makes a PerReplica: see `Strategy.distribute_values_from_function`."""
        return values.values_from_function(self, fn)

    # -- input ----------------------------------------------------------------

    @_cross_replica
    def distribute_dataset(self, dataset: DatasetLike, options: InputOptions | None = None) -> Any:
        """Splits batches over the replicas: see `Strategy.distribute_dataset`."""
        return datasets.distribute_dataset(self.topology, dataset, options)

    @_cross_replica
    def distribute_datasets_from_function(
        self, fn: Callable[[Any], Any], options: InputOptions | None = None
    ) -> Any:
        """Distributes a function's elements: `Strategy.distribute_datasets_from_function`."""
        return datasets.distribute_datasets_from_function(self.topology, fn, options)

    @_cross_replica
    def run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Iterator[PyTree],
        iterations: int = 1,
        initial_loop_values: Mapping[str, PyTree] | None = None,
    ) -> MultiStepContext:
        """Runs ``fn(context, inputs)`` K times, as one compiled loop.

        The loop carries the variables; the input of all K steps is moved ahead in one transfer.

        Args:
          fn: one step, in cross-replica context; it reports to `context`.
          iterator: of a distributed dataset, or any iterator of arrays.
          iterations: K, 1 or more. If the data ends early, only the steps that have
            input run; `MultiStepContext.iterations` tells how many.
          initial_loop_values: name -> value of `context.last_step_outputs` in the
            first step; later steps see those of the step before.

        Context: cross-replica or default.

        Raises:
          StopIteration: the iterator is exhausted.
          ValueError: iterations < 1.
        Source: tf.distribute.StrategyExtended.experimental_run_steps_on_iterator (TF 1.13).
        """
        return run_steps(self.step_programs, fn, iterator, iterations, initial_loop_values)

    # -- variables ------------------------------------------------------------

    @_off_user_mesh
    def create_variable(self, initial_value: PyTree, **options: Any) -> Variable:
        """Creates a variable by this strategy's policy; called by `Variable`.

        A function that creates variables in a trace is traced again, and then gets those of the
        first trace: what an override counts or remembers is that of a new variable only if it was
        not in `variables` before.
        """
        variable = make_variable(self.strategy, self.placement, initial_value, **options)
        self.variables.add(variable)
        return variable

    def make_storage(self, variable: Variable) -> StoredArray:
        """Returns the storage for the array of a new variable."""
        return make_storage(variable, self.variable_lock)

    @_off_user_mesh
    def copy_variable(self, variable: Variable) -> Variable:
        """Returns a new variable with a copy of every component (for deepcopy)."""
        made = copy_variable(variable)
        self.variables.add(made)
        return made

    @_cross_replica
    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs ``fn(var, *args, **kwargs)`` once per copy of `var`.

        Args:
          var: a variable of this strategy.
          fn: reads and writes the copy through `var`; writes are raw. If it raises, nothing of
            what it wrote, to other variables too, has been written.
          args: with the locality of `var`; per-replica ones are passed component by component.
          kwargs: keyword arguments.
          group: True: returns the merged result. False: returns a nest whose leaves are
            lists with one element per copy.

        Locality: V(var) in and out. Context: cross-replica or default.

        Raises:
          LocalityError: a per-replica argument for a mirrored variable.
          StrategyMismatchError: a variable of another strategy.
          TypeError: `var` is not a variable.
        Source: tf.distribute.StrategyExtended.update (TF 1.13).
        """
        return updating.update(self, var, fn, *require_call(fn, args, kwargs, "update"), group)

    @_cross_replica
    def update_non_slot(
        self,
        colocate_with: Destinations,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs ``fn(*args, **kwargs)`` on the non-slot devices.

        Args:
          colocate_with: what `non_slot_devices` returned.
          fn: the function; per-replica arguments are passed copy by copy.
          args: positional arguments.
          kwargs: keyword arguments.
          group: as in `update`; one element per copy of a non-slot variable, or per
            replica where results differ.

        Locality: N in and out. Context: cross-replica or default.

        Raises:
          ValueError: devices other than the non-slot ones.
        Source: tf.distribute.StrategyExtended.update_non_slot (TF 1.13).
        """
        args, kwargs = require_call(fn, args, kwargs, "update_non_slot")
        return updating.update_non_slot(self, colocate_with, fn, args, kwargs, group)

    def update_frame(self) -> Frame:
        """Returns the (cross-replica) frame in which an update runs on a copy."""
        return Frame(self.strategy, state=frames.current().state, in_update=True)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Destinations:
        """Returns the devices for variables that belong to no other variable.

        Pass them to `colocate_vars_with` and `update_non_slot`.

        Source: tf.distribute.StrategyExtended.non_slot_devices (TF 1.13).
        """
        return self.parameter_devices

    def colocate_vars_with(
        self, colocate_with_variable: Destinations
    ) -> AbstractContextManager[None]:
        """Returns a context in which new variables live where a given one does.

        Args:
          colocate_with_variable: a variable of this strategy, or its `non_slot_devices`.

        Locality: variables made inside have V(variable), or N. Context: in this strategy's scope.
        Source: tf.distribute.StrategyExtended.colocate_vars_with (TF 1.13).
        """
        return updating.colocate(self, colocate_with_variable)

    def pause_writers(self) -> AbstractContextManager[None]:
        """Returns a context in which none of the strategy's own threads write variables.

        Variables read inside are consistent with each other.
        """
        return contextlib.nullcontext()

    def read_var(self, v: Variable) -> jax.Array:
        """Returns the value of `v`, aggregated if its components differ."""
        updating.require_variable(v, "read_var")
        return v.value

    def value_container(self, value: PyTree) -> Any:
        """Returns the variable whose `local_results` gave out `value`, else `value` itself."""
        return next((v for v in self.variables if v.stored.gave_out(value)), value)

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Returns whether `v` belongs to this strategy."""
        updating.require_variable(v, "variable_created_in_scope")
        return v.strategy is self.strategy
