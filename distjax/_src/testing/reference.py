"""The reference interpreter: the programming model without compilation.

Each replica is a thread that computes with concrete arrays (`reference_replicas.py`), and each
variable is a list of R components (`reference_variables.py`). After a run, results that are
equal on every replica are found by comparing them, whereas a compiled strategy proves it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distjax._src import jax_compat
from distjax._src.collectives.ops import as_reduce_op
from distjax._src.context import Destinations, frames, without_expectations
from distjax._src.placement import REPLICA_AXIS, PerReplica, is_per_replica, one_device_topology
from distjax._src.replica.arguments import mark_modules, require_call, unmark
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.inspection import StrategyDescription, describe
from distjax._src.strategies.steps import MultiStepContext, require_steps
from distjax._src.strategies.strategy import Strategy
from distjax._src.strategies.values import ValueContext
from distjax._src.testing.reference_replicas import (
    combine,
    combine_within,
    components,
    concatenate,
    regroup,
    require_mean,
    require_no_objects,
    run_replicas,
    select,
)
from distjax._src.testing.reference_variables import ComponentFrame, ReferenceVariable
from distjax._src.typing import (
    AxisLike,
    DTypeLike,
    PositionalArgs,
    PyTree,
    ReduceOp,
    ReduceOpLike,
)
from distjax._src.variables.construct import initializer_of
from distjax._src.variables.conversion import is_number
from distjax._src.variables.layouts import MirroredPlacement
from distjax.errors import LocalityError, UnsupportedError


class ReferenceStrategy(Strategy):
    """Runs R replicas as threads that wait for each other, for tests and debugging.

    Nothing is traced or compiled: replicas hold concrete arrays, prints and
    breakpoints in a replica function work, and inner `jit`, `lax.scan`,
    `while_loop` and `cond` run step by step (`jax.disable_jit`). It is slow. Tests
    compare the compiled strategies with it.

    Results that are equal on every replica are returned as plain arrays, others
    as PerReplica.

    Args:
      num_replicas: R.

    Not supported: bare `jax.lax` collectives (`lax.psum(x, axis_name)`: there is no
    axis; write ``ctx.all_reduce``), `dj.jit` and `jax.jit` around `run`, derivatives
    and batching of merges and collectives other than `all_reduce`, Python state that
    differs per replica, NNX objects.

    Example:
      >>> strategy = dj.testing.ReferenceStrategy(2)
      >>> def fn(three):
      ...     ctx = dj.get_replica_context()
      ...     v = three + ctx.replica_id_in_sync_group
      ...     print("replica", ctx.replica_id_in_sync_group, "has", v)
      ...     return ctx.merge_call(lambda strategy, v: strategy.reduce("sum", v), args=(v,))
      >>> strategy.run(fn, args=(3,))
      replica 0 has 3
      replica 1 has 4
      Array(7, dtype=int32)

    Source: tf.distribute.StrategyExtended.call_for_each_replica and
      ReplicaContext.merge_call (TF 1.13).
    """

    def __init__(self, num_replicas: int):
        self._reference = extended = ReferenceExtended(num_replicas)
        super().__init__(extended)

    def describe(self, only: str = "", *, full: bool = False) -> StrategyDescription:
        """Returns a table of the replicas and variables: see `Strategy.describe`.

        The bytes of a variable are those of its components; components that share an array
        count once.
        """
        found = [v.describe() for v in self._reference.created]
        return describe(self._extended, found, only, full)

    def __repr__(self) -> str:
        return f"ReferenceStrategy({self.num_replicas_in_sync})"


class ReferenceExtended(StrategyExtended):
    """The `extended` of a ReferenceStrategy: StrategyExtended, uncompiled."""

    compiles = False
    strategy: Any

    def __init__(self, num_replicas: int):
        topology = one_device_topology(jax.local_devices()[0], num_replicas, REPLICA_AXIS)
        super().__init__(topology, MirroredPlacement(topology))
        #: In order of creation.
        self.created = weakref.WeakKeyDictionary[ReferenceVariable, None]()

    @property
    def public_axis_name(self) -> None:
        """None: there is no axis."""
        return None

    # -- replicas -------------------------------------------------------------

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``fn`` once per replica; replicas pause where they wait for each other."""
        args, kwargs = without_expectations(*require_call(fn, args, kwargs, "run"))
        self._require_context("run")
        require_no_objects(self.strategy, fn, args, kwargs)
        as_arrays = jax.tree.map(
            lambda x: jnp.asarray(x) if is_number(x) else x,
            mark_modules((args, kwargs)),
            is_leaf=is_per_replica,
        )
        local = [
            unmark(select(as_arrays, i, self.topology, "an argument of run"))
            for i in range(self.num_replicas)
        ]
        calls = [lambda a=a, k=k: fn(*a, **k) for a, k in local]
        return regroup(run_replicas(self.strategy, calls), self.topology, "a result of run")

    def _require_context(self, method: str) -> None:
        frames.require_cross_replica(self.strategy, method)
        if frames.current().state is None and not jax_compat.tracing():
            return
        raise UnsupportedError(
            f"{method} of {self.strategy!r} needs to be called outside of JAX traces",
            got="a call inside dj.jit, jax.jit, grad or vmap",
            why="the reference interpreter runs replicas as threads on concrete values",
            fix="call the function without jit: step.__wrapped__(...) for a dj.jit function",
        )

    # -- cross-replica operations ---------------------------------------------

    def reduce(
        self, op: ReduceOpLike, value: PyTree, axis: AxisLike = None, mask: PyTree = None
    ) -> Any:
        """Returns the sum or mean over the replicas, and over `axis` within each."""
        op = as_reduce_op(op)
        self._require_context("reduce")
        if axis is None and mask is None:
            return jax.tree.map(lambda x: self._reduce_value(op, x), value, is_leaf=is_per_replica)
        parts = self._parts(op, value)
        if parts is None:
            require_mean(op, value, self.num_replicas)
            parts = [jnp.asarray(value)] * self.num_replicas
        if mask is not None and not isinstance(mask, PerReplica):
            mask = jnp.asarray(mask)
        return combine_within(op, parts, axis, components(mask, self.num_replicas))

    def _reduce_value(self, op: ReduceOp, value: PyTree) -> Any:
        parts = self._parts(op, value)
        if parts is not None:
            return combine(op, parts)
        require_mean(op, value, self.num_replicas)
        return value

    def _parts(self, op: ReduceOp, value: PyTree) -> list[Any] | None:
        """Returns the replicas' values, or None for a value not on the replicas."""
        if not isinstance(value, ReferenceVariable):
            return components(value, self.num_replicas)
        if op is ReduceOp.SUM and not value.is_on_read and self.num_replicas > 1:
            raise LocalityError(
                f"reduce(SUM) needs a value per replica, not mirrored variable {value.name!r}",
                got=repr(value),
                why="its components are equal: the sum would be R times the variable",
                fix="use v.value",
            )
        return list(value.local_results())

    def reduce_to(self, op: ReduceOpLike, value: PyTree, destinations: Destinations) -> Any:
        """Returns `value` reduced; destinations are ignored, as there is one device."""
        return self.reduce(op, value)

    def batch_reduce_to(
        self, op: ReduceOpLike, value_destination_pairs: Sequence[tuple[PyTree, Destinations]]
    ) -> list[Any]:
        """Returns the values of (value, destinations) pairs, reduced."""
        self._require_context("batch_reduce_to")
        return [self.reduce_to(op, value, where) for value, where in value_destination_pairs]

    def broadcast_to(self, value: PyTree, destinations: Destinations = None) -> Any:
        """Returns `value` as arrays."""
        self._require_context("broadcast_to")
        return jax.tree.map(jnp.asarray, value)

    def gather(self, value: PyTree, axis: int) -> Any:
        """Returns the replicas' values concatenated along `axis`."""
        self._require_context("gather")

        def leaf(x: PyTree) -> Any:
            parts = self._parts(ReduceOp.MEAN, x)
            return x if parts is None else concatenate(parts, axis, "gather")

        return jax.tree.map(leaf, value, is_leaf=is_per_replica)

    def local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Returns the replicas' values; a 1-tuple for a value not on them."""
        if isinstance(value, ReferenceVariable):
            return value.local_results()
        is_leaf = value is None or jax.tree_util.all_leaves([value], is_leaf=is_per_replica)
        if is_leaf:
            return tuple(components(value, self.num_replicas) or (value,))

        def part(x: PyTree, replica: int) -> Any:
            x = x.local_results()[replica] if isinstance(x, ReferenceVariable) else x
            return x.stacked[replica] if isinstance(x, PerReplica) else x

        split = lambda i: jax.tree.map(lambda x: part(x, i), value, is_leaf=is_per_replica)
        return tuple(split(i) for i in range(self.num_replicas))

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """Returns a PerReplica of ``fn(ValueContext)`` for each replica."""
        trees = [fn(ValueContext(i, self.num_replicas)) for i in range(self.num_replicas)]
        stack = lambda *leaves: PerReplica(jnp.stack([*map(jnp.asarray, leaves)]), self.topology)
        return jax.tree.map(stack, *trees)

    def run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, Any], Any],
        iterator: Iterator[PyTree],
        iterations: int = 1,
        initial_loop_values: Mapping[str, PyTree] | None = None,
    ) -> MultiStepContext:
        """Runs up to K steps, one after the other, in cross-replica context."""
        self._require_context("run_steps_on_iterator")
        with self.strategy.scope():
            iterations = require_steps(fn, iterator, iterations, initial_loop_values)
            context = MultiStepContext(initial_loop_values)
            for element in itertools.islice(iterator, iterations):
                is_carried = initial_loop_values is not None
                step = MultiStepContext(context.last_step_outputs if is_carried else None)
                fn(step, element)
                context.last_step_outputs.update(jax.tree.map(jnp.asarray, step.last_step_outputs))
                context.non_tensor_outputs.update(step.non_tensor_outputs)
                context.iterations += 1
            if context.iterations == 0:
                raise StopIteration
            return context

    # -- variables ------------------------------------------------------------

    def create_variable(
        self,
        initial_value: PyTree,
        *,
        name: str,
        dtype: DTypeLike | None,
        sharding: PyTree = None,
        **options: PyTree,
    ) -> ReferenceVariable:
        """Creates a variable; in a replica context, all replicas meet and share it.

        Its initial value is that of replica 0. A replica has one device: `sharding` says nothing.
        """
        value = initial_value() if callable(initial_value) else initial_value
        value = value.value if isinstance(value, ReferenceVariable) else value
        initial = jnp.asarray(initializer_of(value, dtype, name)())

        def make(values: Sequence[Any]) -> list[ReferenceVariable]:
            made = ReferenceVariable.make(self.strategy, values[0], name=name, **options)
            return [made] * len(values)

        context = frames.current().replica_context
        if context is None:
            return make([initial])[0]
        return context.meet(f"creation of variable {name!r}", initial, make)

    def update(
        self,
        var: PyTree,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs ``fn(var, *args, **kwargs)`` once per component of `var`."""
        args, kwargs = require_call(fn, args, kwargs, "update")
        given = jax.tree.leaves((args, kwargs), is_leaf=is_per_replica)
        if not var.is_on_read and any(isinstance(x, PerReplica) for x in given):
            raise LocalityError(
                f"update of variable {var.name!r} needs arguments equal on every component",
                got="a PerReplica",
                why="every component of a mirrored variable gets the same update",
                fix="g = strategy.extended.reduce_to('sum', g, var)",
            )
        result = self.update_non_slot(var, lambda *a, **k: fn(var, *a, **k), args, kwargs, group)
        if not var.is_on_read:
            var.require_equal_components()
        return result

    def update_non_slot(
        self,
        colocate_with: Destinations,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Runs ``fn(*args, **kwargs)`` once per component."""
        args, kwargs = require_call(fn, args, kwargs, "update")
        self._require_context("update")
        results = []
        for i in range(self.num_replicas):
            local_args, local_kwargs = select(
                (args, kwargs), i, self.topology, "an argument of update"
            )
            frame = ComponentFrame(self.strategy, in_update=True, component=i)
            with frames.with_frame(frame):
                results.append(fn(*local_args, **local_kwargs))
        if group:
            return regroup(results, self.topology, "a result of update")
        return jax.tree.map(lambda *leaves: list(leaves), *results)

    def read_var(self, v: PyTree) -> jax.Array:
        """Returns the value of `v`, aggregated if its components differ."""
        return v.value

    def value_container(self, value: PyTree) -> Any:
        """Returns the variable of which `value` is a component, else `value` itself."""
        owners = (v for v in self.created if any(c is value for c in v.components))
        return next(owners, value)

    def variable_created_in_scope(self, v: PyTree) -> bool:
        """Returns whether `v` belongs to this strategy."""
        return v.strategy is self.strategy

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Destinations) -> Generator[None]:
        """Has no effect: there is one device."""
        yield
