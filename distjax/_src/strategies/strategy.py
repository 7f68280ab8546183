"""Strategy: a thin facade over StrategyExtended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jax.sharding import Mesh

from distjax._src.context import StrategyLike, frames
from distjax._src.data.options import InputOptions
from distjax._src.program.jit import add_cause_note, compile_on_replicas
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.inspection import StrategyDescription, describe, require_equal_copies
from distjax._src.strategies.reducing import on_host_where
from distjax._src.strategies.values import stack_rows, take_first
from distjax._src.typing import AxisLike, DatasetLike, PositionalArgs, PyTree, ReduceOpLike
from distjax._src.user_lines import keep_user_lines
from distjax.errors import message


class Strategy:
    """Where replicas run, where variables live, and how values are combined.

    A subclass only builds its StrategyExtended, ``super().__init__(extended)``,
    from the parts it picks. What depends on these is in `extended`.

    Source: tf.distribute.Strategy (TF 1.13).
    """

    def __init__(self, extended: StrategyExtended):
        self._extended = extended
        extended.bind(self)

    @property
    def extended(self) -> StrategyExtended:
        """The methods for algorithms that need to be distribution-aware."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas that synchronize their updates."""
        return self._extended.num_replicas

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh [R, *model sizes]; None where replicas share a device."""
        return self._extended.users_mesh

    @property
    def axis_name(self) -> str | None:
        """The replica axis inside `run`, for `lax.psum` and BatchNorm, or None."""
        return self._extended.public_axis_name

    def scope(self) -> frames.Scope:
        """Returns a context manager that makes this strategy active.

        Variables created in it belong to the strategy, which ``as`` binds. A scope is
        reusable and reentrant, and may be active in several threads at once.

        Context: cross-replica of this strategy, or none active.

        Raises:
          StrategyMismatchError: another strategy is active.
          ContextError: in a replica context; exited out of order, twice, or in another thread.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> with strategy.scope():
          ...     v = dj.Variable(1.0)
          ...     print(dj.in_cross_replica_context(), v.strategy is strategy)
          True True

        Source: tf.distribute.Strategy.scope (TF 1.13).
        """
        return frames.Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``fn`` on every replica as one compiled program.

        Args:
          fn: the replica function, traced once per signature.
          args: positional arguments, a tuple or list. PerReplica leaves give each replica
            its own value; arrays and numbers go to all; other objects pass through.
          kwargs: keyword arguments, likewise.

        Returns:
          The results: an array where proved equal on every replica, else a PerReplica;
          Python objects and variables pass through. Exceptions of ``fn`` propagate unchanged.

        Locality: T, M and variables in; M or T out. Context: cross-replica or default.
        Cost: one compilation per signature; the collectives that ``fn`` asks for.

        Raises:
          ValueError: args or kwargs of the wrong type; objects unhashable, or that hold arrays.
          LocalityError: a PerReplica of other replicas, or an array that is split over the
            replicas without being a PerReplica.
          ContextError, StrategyMismatchError: in a replica, or under another strategy.
          DivergenceError: a collective under a predicate that differs between replicas.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> def fn(three):
          ...     ctx = dj.get_replica_context()
          ...     v = three + ctx.replica_id_in_sync_group
          ...     return v, ctx.all_reduce("sum", v)
          >>> v, total = strategy.run(fn, args=(3,))
          >>> strategy.local_results(v), total
          ((Array(3, dtype=int32), Array(4, dtype=int32)), Array(7, dtype=int32))

        Source: tf.distribute.Strategy.run (TF 2);
          StrategyExtended.call_for_each_replica (TF 1.13).
        """
        try:
            return self._extended.call_for_each_replica(fn, args, kwargs)
        except Exception as error:
            add_cause_note(error, self)
            keep_user_lines(error)
            raise

    def reduce(
        self, op: ReduceOpLike, value: PyTree, axis: AxisLike = None, mask: PyTree = None
    ) -> Any:
        """Returns `value` reduced over the replicas, and over `axis` within each.

        Args:
          op: a ReduceOp or its name. A mean with an axis weights all elements equally.
          value: a tree of PerReplica (or Mirrored, as R copies); with an axis, one value.
          axis: None, an int or a tuple of ints: axes of one replica's value.
          mask: bool, [B] per replica or any leading part of the shape of one replica's value:
            what counts. If nothing does, a sum is 0 and a mean NaN.

        Locality: T or M in, M out. Context: cross-replica or default. Cost: all-reduce per value.

        Raises:
          ValueError: SUM of a value not on the replicas, an unknown `op`, an axis out of range.
          TypeError: an axis or a mask given for a tree.
          LocalityError: SUM of a mirrored variable, a PerReplica of other replicas, or an array
            that is split over the replicas without being a PerReplica.
          BatchError: a mask of the wrong dtype or shape.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> x = strategy.run(lambda x: x + dj.get_replica_context().replica_id_in_sync_group,
          ...                  args=(jnp.array([1.0, 3.0]),))
          >>> strategy.reduce("sum", x), strategy.reduce("mean", x, axis=0)
          (Array([3., 7.], dtype=float32), Array(2.5, dtype=float32))

        Source: tf.distribute.Strategy.reduce.
        """
        return self._extended.reduce(op, value, axis, mask)

    def broadcast(self, tree: PyTree) -> Any:
        """Returns the tree with every array on all replicas: `extended.broadcast_to(tree)`.

        Args:
          tree: arrays, equal in all processes.

        Locality: M out. Context: cross-replica or default.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> params = strategy.broadcast({"w": np.zeros(3)})
        """
        return self._extended.broadcast_to(tree)

    def gather(self, value: PyTree, axis: int, mask: PyTree = None) -> Any:
        """Returns the replicas' values concatenated along `axis`.

        Args:
          value: a tree of PerReplica (or Mirrored, as R copies) of [..., B, ...].
          axis: an axis of one replica's value, 0 or more.
          mask: bool [B] on each replica, as `dj.Batch` has it: which of them count.

        Returns:
          [..., R * B, ...]; values that are not on the replicas pass through. With a mask, numpy
          arrays of those that count, in the order of the batch, without padding.

        Locality: T or M in, M out. Context: cross-replica or default; with a mask, no trace.
        Cost: all-gather per value.

        Raises:
          ValueError: a scalar, an axis out of range, a mask of another length, or in a trace.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> options = dj.InputOptions(partial="pad")
          >>> for batch in strategy.distribute_dataset([np.arange(4.0), np.arange(3.0)], options):
          ...     doubled = strategy.run(lambda x: 2 * x, args=(batch.data,))
          ...     print(strategy.gather(doubled, axis=0, mask=batch.mask))
          [0. 2. 4. 6.]
          [0. 2. 4.]

        Source: tf.distribute.Strategy.gather.
        """
        gathered = self._extended.gather(value, axis)
        if mask is None:
            return gathered
        return on_host_where(self._extended.gather(mask, 0), gathered, axis)

    def local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Returns the values of this process's replicas, in replica order.

        R arrays for a PerReplica or a mirrored array, a variable's components,
        a 1-tuple for anything else; for a tree, a tuple of trees.

        Context: any. Cost: none.

        Raises:
          LocalityError: a PerReplica of other replicas.

        Source: tf.distribute.Strategy.experimental_local_results (TF 1.15); `unwrap` (TF 1.13).
        """
        return self._extended.local_results(value)

    def per_replica(self, stacked: PyTree) -> Any:
        """Returns a tree of [R, ...] arrays as PerReplica: row r is replica r's value.

        Args:
          stacked: a tree of arrays [R, ...], as functions under `jax.pmap` take and return
            them. PerReplica leaves, Python numbers and objects pass through.

        Locality: T out, even if the rows are equal: nothing is compared; a strategy that
          never wraps returns the row. Context: any. Cost: moves the rows to their replicas.

        Raises:
          LocalityError: an array whose leading dimension is not R, a tree without arrays, or
            a PerReplica of other replicas.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> keys = strategy.per_replica(jax.random.split(jax.random.key(0), 2))
          >>> strategy.run(lambda key: jax.random.normal(key, (3,)), args=(keys,)).shape
          (3,)
        """
        return stack_rows(self._extended, stacked)

    def first(self, tree: PyTree) -> Any:
        """Returns the first replica's values of a tree, as arrays on every replica.

        The counterpart of `flax.jax_utils.unreplicate`: row 0 of a PerReplica, or of an
        array split over the replicas. A variable gives its first component; a value
        shared by all replicas is returned as is.

        Locality: T or M in, M out. Context: any. Cost: sends a row to all replicas.

        Raises:
          LocalityError: a PerReplica of other replicas, or a split array whose leading
            dimension is not R.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> strategy.first({"w": strategy.per_replica(np.arange(6.0).reshape(2, 3))})
          {'w': Array([0., 1., 2.], dtype=float32)}
        """
        return take_first(self._extended, tree)

    def jit(
        self,
        fn: Callable[..., Any],
        *,
        donate_argnums: int | Sequence[int] = (),
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
    ) -> Callable[..., Any]:
        """Returns a compiled function, called like ``fn``, that runs it on every replica.

        Equivalent to ``dj.jit(lambda *args: strategy.run(fn, args), ...)``.

        Args:
          fn: the replica function.
          donate_argnums: positional arguments whose buffers the program may reuse.
          static_argnums: positions of parameters that are Python values, part of the program.
          static_argnames: the same, by name.

        Raises:
          TypeError: ``fn`` is not a function.
          ValueError: ``fn`` has no parameter of a given number or name.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> step = strategy.jit(lambda w, x: w - jax.lax.pmean(x, "replica"), donate_argnums=0)
          >>> step(jnp.ones(2), strategy.per_replica(np.arange(4.0).reshape(2, 2)))
          Array([ 0., -1.], dtype=float32)
        """
        return compile_on_replicas(self, fn, donate_argnums, static_argnums, static_argnames)

    def distribute_dataset(self, dataset: DatasetLike, options: InputOptions | None = None) -> Any:
        """Returns the batches of `dataset` split over the replicas.

        Args:
          dataset: an iterable of trees of arrays (numpy, JAX, or anything that numpy
            converts, such as torch and TensorFlow tensors) that share a leading dimension
            G, the global batch. Every ``iter`` calls its ``set_epoch(n)``, n = 0, 1, ..., if it has
            one, and iterates it afresh.
          options: a `dj.InputOptions`, which decides what happens to smaller batches.

        Returns:
          A `dj.DistributedDataset`. Its elements are trees of PerReplica [G / R, ...],
          moved to the devices by a background thread; bare arrays where R is 1. The
          default strategy returns `dataset` itself where a plain loop does the same.

        Locality: T out. Context: cross-replica or default.

        Raises:
          BatchError: a batch that cannot be split; raised at once if length and items show it.

        Example:
          >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
          >>> batches = [{"x": np.arange(4.0) + i} for i in range(2)]
          >>> for batch in strategy.distribute_dataset(batches):
          ...     print(strategy.reduce("mean", batch["x"], axis=0))
          1.5
          2.5

        Source: tf.distribute `experimental_distribute_dataset`.
        """
        return self._extended.distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self, fn: Callable[[Any], Any], options: InputOptions | None = None
    ) -> Any:
        """Returns the elements of ``fn(InputContext)``, one per replica and step.

        Nothing is split or rebatched: consecutive elements go to consecutive replicas.

        Args:
          fn: called once (a process has one input pipeline); returns an iterable of
            trees of arrays, of any rank, equal in shape within one step.
          options: a `dj.InputOptions`, which decides about a last step that lacks elements.

        Returns:
          A `dj.DistributedDataset`, as for `distribute_dataset`.

        Locality: T out. Context: cross-replica or default.

        Raises:
          BatchError: elements of one step that differ in shape or structure, or are missing.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> def fn(ctx):
          ...     size = ctx.get_per_replica_batch_size(4)
          ...     return [np.arange(i, i + size) for i in range(0, 8, size)]
          >>> for x in strategy.distribute_datasets_from_function(fn):
          ...     print(x.stacked.tolist())
          [[0, 1], [2, 3]]
          [[4, 5], [6, 7]]

        Source: tf.distribute `distribute_datasets_from_function`.
        """
        return self._extended.distribute_datasets_from_function(fn, options)

    def distribute_values_from_function(self, fn: Callable[[Any], Any]) -> Any:
        """Returns a PerReplica of ``fn(ValueContext)`` for each replica.

        Args:
          fn: called once per replica, in order; returns a tree of arrays of the same shapes.

        Locality: T out; a strategy that never wraps returns the single value.
        Context: any. Source: tf.distribute `experimental_distribute_values_from_function`.
        """
        return self._extended.distribute_values_from_function(fn)

    def describe(self, only: str = "", *, full: bool = False) -> StrategyDescription:
        """Returns a table of devices, replicas, and each variable's place and bytes.

        Args:
          only: part of the names of the variables that are wanted, such as "attention".
          full: a line for each variable; else many that are alike share one.

        Context: any. Cost: none; nothing is read or moved.

        Example:
          >>> strategy = dj.ShardedStrategy(
          ...     jax.devices()[:2], partition="parameters", min_split_bytes=0
          ... )
          >>> with strategy.scope():
          ...     w = dj.Variable(jnp.zeros((4, 3)), name="w")
          >>> found = strategy.describe()
          >>> found.bytes_per_device, found.variables[0].placement
          (24, 'partitioned on axis 0')
          >>> print(found)
          ShardedStrategy(Topology(R=2 over 'replica' on 2 devices))
            replicas              2
            devices               2, one for each replica: ...
            variables             1
            bytes per device      24 B
            bytes on all devices  48 B
          variables:
            name  shape   dtype    synchronization  aggregation  placement ...
            w     [4, 3]  float32  ON_WRITE         NONE         partitioned on axis 0  24 B
        """
        return describe(self._extended, only=only, full=full)

    def assert_mirrored(self, tree: PyTree) -> None:
        """Raises unless all copies of each value in `tree` are equal bit for bit.

        JAX reads the first copy of a replicated array and never compares. NaN equals
        NaN. A split array is compared where it has copies.

        Args:
          tree: a tree of arrays and variables; other leaves are skipped.

        Context: cross-replica or default. Cost: copies all of this process's data to the host.

        Raises:
          LocalityError: copies differ (names path, replica, first index and both
            values), or a per-replica value (PerReplica, sync-on-read variable).
          ContextError: a traced value.

        Example:
          >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
          >>> state = strategy.broadcast({"w": np.ones(3)})
          >>> strategy.assert_mirrored(state)
          >>> copies = [jax.device_put(np.float32(r), d) for r, d in enumerate(jax.devices()[:2])]
          >>> drifted = jax.make_array_from_single_device_arrays((), state["w"].sharding, copies)
          >>> strategy.assert_mirrored({"w": drifted})
          Traceback (most recent call last):
          ...
          distjax.errors.LocalityError: the value['w'] needs to be equal on every replica, and
          replica 1 (...) drifted. ...
        """
        frames.require_cross_replica(self, "assert_mirrored")
        require_equal_copies(self._extended.topology, tree)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._extended.topology!r})"

    # A strategy is one object in one process. One that was made again with equal arguments, as by a
    # cell of a notebook, is another object, which keeps arrays in the same places: see `are_equal`.

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            message(
                f"{self!r} needs to stay one object",
                got="copy.copy or copy.deepcopy of a strategy",
                why="variables and compiled programs belong to this very object",
                fix="pass the strategy itself around, or construct a second one",
            )
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__copy__()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            message(
                f"{self!r} needs to stay in its process",
                got="pickle of a strategy, or of what holds one",
                why="its devices, variables and compiled programs belong to this process",
                fix=f"construct a {type(self).__name__} there, and take the state with "
                "dj.checkpoint.Checkpointer(directory): save(step, tree) here, restore(tree) there",
            )
        )


def are_equal(one: StrategyLike, other: StrategyLike) -> bool:
    """Returns whether two strategies are of one class, on the same devices, with equal options.

    The NNX modules of the one are as good as those of the other.
    """
    if not isinstance(one, Strategy) or not isinstance(other, type(one)):
        return False
    own, theirs = one.extended, other.extended
    return (
        type(one) is type(other)
        and own.topology is theirs.topology  # equal ones are one object
        and own.placement == theirs.placement
        and own.communication == theirs.communication
    )
