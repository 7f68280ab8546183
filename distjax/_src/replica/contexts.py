"""What a replica function can query and do: in a strategy, and in the default one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distjax._src.collectives import ops
from distjax._src.collectives.ops import require_dense
from distjax._src.context import (
    Finding,
    Frame,
    StrategyLike,
    frames,
    mixing_text,
    other_call_text,
    report,
)
from distjax._src.placement import PerReplica, require_held, require_local
from distjax._src.replica.arguments import add_merge_note, require_call
from distjax._src.replica.merge import UserMerge, trace_merge
from distjax._src.typing import PositionalArgs, PyTree, ReduceOpLike
from distjax._src.user_lines import calling_line
from distjax._src.variables.variable import Variable
from distjax.errors import (
    ContextError,
    MergeError,
    StrategyMismatchError,
    describe_value,
    message,
)


class ReplicaContext:
    """One replica's view of the others, inside a replica function.

    Obtained from `dj.get_replica_context()`; valid while the function is traced.

    Source: tf.distribute.ReplicaContext; tf.distribute.StrategyExtended, "Replica
      context vs. cross-replica context" (TF 1.13).
    """

    def __init__(self, strategy: StrategyLike):
        self._strategy = strategy
        self.merge_error: Exception | None = None
        self.merges: list[UserMerge] = []

    @property
    def strategy(self) -> Any:
        """The strategy that is running the function."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """R, a Python int."""
        return self._strategy.extended.num_replicas

    @property
    def replica_id_in_sync_group(self) -> Any:
        """This replica's index, 0 to R - 1, as a traced int32 scalar."""
        _require_current(self, "replica_id_in_sync_group")
        return lax.axis_index(self._axis_name)

    @property
    def _axis_name(self) -> str:
        return self._strategy.extended.topology.axis_name

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices that run replicas; one trace stands for all of them."""
        return self._strategy.extended.worker_devices

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Returns this replica's view of ``merge_fn(strategy, *args, **kwargs)``.

        All replicas pause here; `merge_fn` runs once, in cross-replica context, and its
        result is returned to each replica.

        Args:
          merge_fn: called with the strategy and the arguments. Python objects and variables
            are passed unchanged, values proved equal as arrays, others as PerReplica. It may
            be traced more than once, and must be pure except through variables.
          args: positional arguments, a tuple or list.
          kwargs: keyword arguments.

        Returns:
          The result; each replica gets its own value of a PerReplica leaf.

        Locality: T or M in; T for PerReplica results, else M.
        Context: replica context, including inside loops, branches, jit, grad and vmap.

        Raises:
          LocalityError: an argument is a PerReplica that the function closes over, or a result
            is a PerReplica of other replicas.
          MergeError: inside a merge function, or where replicas may not all arrive.
          ContextError: outside this context's trace.

        Source: tf.distribute.ReplicaContext.merge_call (TF 1.13).
        """
        args, kwargs = require_call(merge_fn, args, kwargs, "merge_call")
        frame = _require_current(self, "merge_call")
        try:
            merge = trace_merge(self._strategy, merge_fn, args, kwargs)
            self.merges.append(merge)  # the equation refers to it weakly
            return merge.bind(frame.state)
        except Exception as error:
            # A failed merge fails for all replicas, so none can continue without it.
            self.merge_error = error
            add_merge_note(error, merge_fn, args, kwargs)
            raise

    def all_reduce(self, op: ReduceOpLike, value: PyTree) -> Any:
        """Returns the sum or mean of `value` over the replicas, on every replica.

        Args:
          op: a ReduceOp or its name.
          value: a pytree of arrays and numbers [...]; None is an empty tree.

        Locality: T or M in, M out. Context: replica.
        Cost: one all-reduce per leaf. The derivative is the same all-reduce.

        Raises:
          ValueError: `op` is unknown.
          LocalityError: `value` holds a PerReplica that the function closes over.
          TypeError: a leaf is neither an array nor a number.
          NotImplementedError: a sparse array.
          MergeError, ContextError, StrategyMismatchError: outside this context.

        Example:
          >>> def step(x):
          ...     ctx = dj.get_replica_context()
          ...     return ctx.all_reduce("mean", x * ctx.replica_id_in_sync_group)
          >>> dj.VirtualStrategy(3).run(step, args=(2.0,))
          Array(2., dtype=float32)

        Source: tf.distribute.ReplicaContext.all_reduce.
        """
        op = ops.as_reduce_op(op)
        _require_current(self, "all_reduce")
        require_dense(value, "all_reduce")
        axis_name, count = self._axis_name, self._strategy.extended.num_replicas

        def leaf(x: PyTree) -> Any:
            return ops.all_reduce(op, _local_array(x, "all_reduce"), axis_name, count)

        return jax.tree.map(leaf, value, is_leaf=_is_leaf)

    def all_gather(self, value: PyTree, axis: int) -> Any:
        """Returns the replicas' values concatenated along `axis`, on every replica.

        Args:
          value: a pytree of arrays [..., B, ...] with equal shapes on all replicas.
          axis: the axis to concatenate along, 0 or more.

        Locality: T or M in, M out. Context: replica. Cost: one all-gather per leaf.

        Raises:
          ValueError: `value` is a scalar or lacks this axis.
          LocalityError, TypeError, NotImplementedError: as in `all_reduce`.

        Example:
          >>> def step():
          ...     ctx = dj.get_replica_context()
          ...     return ctx.all_gather(ctx.replica_id_in_sync_group[None], axis=0)
          >>> dj.VirtualStrategy(3).run(step)
          Array([0, 1, 2], dtype=int32)

        Source: tf.distribute.ReplicaContext.all_gather.
        """
        _require_current(self, "all_gather")
        require_dense(value, "all_gather")
        axis_name = self._axis_name

        def leaf(x: PyTree) -> Any:
            x = _local_array(x, "all_gather")
            ops.require_gather_axis(x.ndim, axis, "all_gather")
            return ops.all_gather(x, axis, axis_name)

        return jax.tree.map(leaf, value, is_leaf=_is_leaf)

    def fold_in(self, key: jax.Array) -> jax.Array:
        """Returns `key` made different on each replica.

        With an equal key, every replica draws the same random numbers, including dropout
        masks.

        Locality: M in, T out. Context: replica. Cost: none.
        """
        return jax.random.fold_in(key, self.replica_id_in_sync_group)


def _require_current(context: ReplicaContext | DefaultReplicaContext, what: str) -> Frame:
    """Returns the current frame, or raises if it is not that of `context`."""
    frame = frames.current()
    if frame.replica_context is context:
        return frame
    if frame.strategy is not context.strategy:
        text = "Mismatching tf.distribute.Strategy objects: a context is valid only while its "
        raise StrategyMismatchError(
            mixing_text(context.strategy, frame, f"{what} of a replica context").replace(
                "Why: ", f"Why: {text}function is traced. ", 1
            )
        )
    if frame.replica_context is not None:
        raise ContextError(other_call_text(what))
    raise MergeError(
        f"{what} needs replica context. Need to be inside `call_for_each_replica()`",
        got=frame.name,
        why="in a merge function and outside run there is one program, not R replicas",
        fix="strategy.reduce(op, x) in cross-replica context; or enter replica "
        "context with strategy.run(fn, args)",
    )


def _is_leaf(value: object) -> bool:
    return isinstance(value, (PerReplica, Variable))


def _local_array(value: PyTree, method: str) -> jax.Array:
    require_local(value, method)
    value = value.value if isinstance(value, Variable) else value
    require_held(value, method)
    try:
        return jnp.asarray(value)
    except jax.errors.JAXTypeError:  # a tracer error, unrelated to the value
        raise
    except TypeError as error:
        raise TypeError(
            message(
                f"{method} needs arrays and numbers",
                got=describe_value(value),
                why="Python objects are the same on every replica: one trace stands for all",
                fix=f"call ctx.{method}(...) on the arrays only",
            )
        ) from error


class DefaultReplicaContext:
    """A single replica: reductions return their input, merges are plain calls."""

    def __init__(self, strategy: StrategyLike):
        self._strategy = strategy

    @property
    def strategy(self) -> Any:
        """The default strategy."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Always 1."""
        return 1

    @property
    def replica_id_in_sync_group(self) -> int:
        """The Python int 0."""
        return 0

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """JAX's default device."""
        return self._strategy.extended.topology.devices

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context."""
        args, kwargs = require_call(merge_fn, args, kwargs, "merge_call")
        _require_current(self, "merge_call")
        _warn_if_mapped("merge_call")
        frame = Frame(self._strategy, state=frames.current().state)
        with frames.with_frame(frame):
            try:
                return merge_fn(self._strategy, *args, **kwargs)
            except TypeError as error:
                add_merge_note(error, merge_fn, args, kwargs)
                raise

    def all_reduce(self, op: ReduceOpLike, value: PyTree) -> Any:
        """Returns `value`."""
        ops.as_reduce_op(op)
        _require_current(self, "all_reduce")
        _warn_if_mapped("all_reduce")
        return value

    def all_gather(self, value: PyTree, axis: int) -> Any:
        """Returns `value`."""
        _require_current(self, "all_gather")
        _warn_if_mapped("all_gather")
        return value

    def fold_in(self, key: jax.Array) -> jax.Array:
        """Returns `key` folded with 0, as replica 0 of any strategy does."""
        return jax.random.fold_in(key, 0)


def _warn_if_mapped(what: str) -> None:
    """Warns in the body of a `jax.pmap` or `shard_map` of the user, whose devices it ignores.

    A body that leaves some mesh axes to JAX may have no replicas: it is a model's own. Nor are
    replica ids and `fold_in` reported, as every device may have a key of its own.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.manual_axes or set(mesh.manual_axes) != set(mesh.axis_names):
        return
    text = message(
        f"{what} in a jax.pmap or jax.shard_map needs the strategy whose replicas it combines",
        got=f"no strategy, and {mesh.size} devices that each keep their own value",
        why="the default strategy has one replica, and knows no axis of jax.pmap or shard_map",
        fix="dj.pmap in place of jax.pmap, or strategy.run(fn, args); or, where it is meant: "
        "with dj.expect(reason)",
    )
    report(Finding("warning", "a reduction without replicas", text, calling_line()))
