"""Strategy: the thin facade of a StrategyExtended."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jax.sharding import Mesh

from distjax.context import frames, scoping
from distjax.data.options import InputOptions
from distjax.errors import message
from distjax.program.error_notes import add_cause_note
from distjax.program.jit import CompiledFunction, as_numbers
from distjax.program.run_step import require_no_bare_rows
from distjax.replica.arguments import function_name, positional_names, require_callable
from distjax.strategies.contracts import ExtendedContract
from distjax.strategies.mirrored_check import require_equal_copies
from distjax.strategies.rows import stack_rows, take_first
from distjax.strategies.strategy_description import StrategyDescription, describe
from distjax.tracebacks import keep_user_lines
from distjax.typing import AxisLike, DatasetLike, PositionalArgs, PyTree, ReduceOpLike


class Strategy:
    """Where replicas run, where variables live, and how values meet.

    A subclass only builds its StrategyExtended: ``super().__init__(extended)``
    with the parts it picks. All logic is in `extended`.

    Source: tf.distribute.Strategy (TF 1.13).
    """

    def __init__(self, extended: ExtendedContract):
        self._extended = extended
        extended.bind(self)

    @property
    def extended(self) -> ExtendedContract:
        """The methods for algorithms that need to be distribution-aware."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """R, the number of replicas whose updates are brought together."""
        return self._extended.num_replicas

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh [R, *model sizes]; None where replicas share a device."""
        return self._extended.topology.mesh

    @property
    def axis_name(self) -> str | None:
        """The replica axis inside `run`, for `lax.psum` and BatchNorm; None: there is none."""
        return self._extended.public_axis_name

    def scope(self) -> scoping.Scope:
        """Returns a context in which this strategy is active: variables made in it are its own.

        Entering gives the strategy. One scope can be entered again: after it was left,
        inside itself, and in several threads at once.

        Context: cross-replica of this strategy, or none active.

        Raises:
          StrategyMismatchError: another strategy is active.
          ContextError: in a replica context; when left out of order, twice, or in another
            thread than it was entered in.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> with strategy.scope():
          ...     v = dj.Variable(1.0)
          ...     print(dj.in_cross_replica_context(), v.strategy is strategy)
          True True

        Source: tf.distribute.Strategy.scope (TF 1.13).
        """
        return scoping.Scope(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: PositionalArgs = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs ``fn`` on every replica, as one compiled program.

        Args:
          fn: the replica function, traced once per signature.
          args: positional arguments, a tuple or list. PerReplica leaves give each
            replica its own value; arrays and numbers are given to all; anything
            else is passed as it is.
          kwargs: keyword arguments.

        Returns:
          The results: an array where proved equal on every replica, a PerReplica
          where not; Python objects and variables as they are. What ``fn`` raises comes
          out unchanged.

        Locality: T, M and variables in; M or T out. Context: cross-replica or
          default.
        Cost: a compilation per signature; collectives where ``fn`` asks for them.

        Raises:
          ValueError: args or kwargs of another type, an object that is not hashable.
          LocalityError: a PerReplica of other replicas, an array that is no PerReplica
            and lies split over the replicas.
          ContextError, StrategyMismatchError: in a replica, or under another strategy.
          DivergenceError: a collective under a predicate that differs per replica.

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
        """Returns `value` reduced over the replicas, and over `axis` of each value.

        Args:
          op: a ReduceOp or its name. A mean with an axis is over all elements.
          value: a tree of PerReplica (or Mirrored, as R copies); with an axis, one
            value.
          axis: None, an int or a tuple of ints: axes of one replica's value.
          mask: bool [B] per replica: which examples count.

        Locality: T or M in, M out. Context: cross-replica or default.
        Cost: one all-reduce per value.

        Raises:
          ValueError: SUM of a value that is not on the replicas, an unknown `op`, an
            axis that the value does not have.
          TypeError: an axis, or a mask, for a tree.
          LocalityError: SUM of a mirrored variable, a PerReplica of other replicas, an
            array that is no PerReplica and lies split over the replicas.
          BatchError: a mask of another dtype or shape.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> x = strategy.run(lambda x: x + dj.get_replica_context().replica_id_in_sync_group,
          ...                  args=(jnp.array([1.0, 3.0]),))
          >>> strategy.reduce("sum", x), strategy.reduce("mean", x, axis=0)
          (Array([3., 7.], dtype=float32), Array(2.5, dtype=float32))

        Source: tf.distribute.Strategy.reduce.
        """
        return self._extended.reduce(op, value, axis, mask)

    def gather(self, value: PyTree, axis: int) -> Any:
        """Returns the replicas' values end to end along `axis`.

        Args:
          value: a tree of PerReplica (or Mirrored, as R copies) of [..., B, ...].
          axis: an axis of one replica's value, 0 or more.

        Returns:
          [..., R * B, ...]; what is not on the replicas as it is.

        Locality: T or M in, M out. Context: cross-replica or default.
        Cost: an all-gather per value.

        Raises:
          ValueError: a scalar, or an axis that the value does not have.

        Source: tf.distribute.Strategy.gather.
        """
        return self._extended.gather(value, axis)

    def local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Returns the values of the replicas of this process, in replica order.

        R arrays for a PerReplica or a Mirrored array, the components of a
        variable, a 1-tuple for anything else; a tuple of trees for a tree.

        Context: any. Cost: none.

        Raises:
          LocalityError: a PerReplica of other replicas.

        Source: tf.distribute.Strategy.experimental_local_results (TF 1.15); `unwrap`
          (TF 1.13).
        """
        return self._extended.local_results(value)

    def per_replica(self, stacked: PyTree) -> Any:
        """Returns a tree of [R, ...] arrays as PerReplica: row r is the value of replica r.

        Args:
          stacked: a tree of arrays [R, ...], as functions under `jax.pmap` take and give
            them. PerReplica leaves, Python numbers and objects stay as they are.

        Locality: T out, whatever the rows hold: nothing is compared; a strategy that
          never wraps gives the row. Context: any. Cost: the rows are moved to their replicas.

        Raises:
          LocalityError: an array without a leading dimension of R, no array at all, a
            PerReplica of other replicas.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> keys = strategy.per_replica(jax.random.split(jax.random.key(0), 2))
          >>> strategy.run(lambda key: jax.random.normal(key, (3,)), args=(keys,)).shape
          (3,)
        """
        return stack_rows(self._extended, stacked)

    def first(self, tree: PyTree) -> Any:
        """Returns the first replica's values of a tree, as arrays that every replica holds.

        What `flax.jax_utils.unreplicate` is for pmap: row 0 of a PerReplica, and of an
        array that is split over the replicas. A variable gives its first component; one
        value that all replicas share stays as it is.

        Locality: T or M in, M out. Context: any. Cost: a row is sent to all replicas.

        Raises:
          LocalityError: a PerReplica of other replicas, a split array without a leading
            dimension of R.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> strategy.first({"w": strategy.per_replica(np.arange(6.0).reshape(2, 3))})
          {'w': Array([0., 1., 2.], dtype=float32)}
        """
        return take_first(self._extended, tree)

    def jit(
        self, fn: Callable[..., Any], *, donate_argnums: int | Sequence[int] = ()
    ) -> Callable[..., Any]:
        """Returns a function that runs ``fn`` on every replica, to be called as ``fn`` is.

        The same as ``dj.jit(lambda *args: strategy.run(fn, args), ...)``.

        Args:
          fn: the replica function.
          donate_argnums: positional arguments whose buffers the program may reuse.

        Raises:
          TypeError: ``fn`` is no function.
          ValueError: a donated argument that is no number.

        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> step = strategy.jit(lambda w, x: w - jax.lax.pmean(x, "replica"), donate_argnums=0)
          >>> step(jnp.ones(2), strategy.per_replica(np.arange(4.0).reshape(2, 2)))
          Array([ 0., -1.], dtype=float32)
        """
        require_callable(fn, "jit")

        @functools.wraps(fn)
        def run_on_replicas(*args: PyTree, **kwargs: PyTree) -> Any:
            return self.run(fn, args, kwargs)

        donated = as_numbers(donate_argnums, "donate_argnums")
        require = functools.partial(
            require_no_bare_rows, self._extended.topology, function_name(fn), positional_names(fn)
        )
        return CompiledFunction(run_on_replicas, donated, frozenset(), require)

    def distribute_dataset(self, dataset: DatasetLike, options: InputOptions | None = None) -> Any:
        """Returns the batches of `dataset`, split over the replicas.

        Args:
          dataset: an iterable of trees of arrays (numpy, JAX, or anything that numpy
            takes: tensors of torch and TensorFlow) with one common leading dimension G,
            the global batch. Iterated again for every ``iter``.
          options: a `dj.InputOptions`; it says what happens to smaller batches.

        Returns:
          A `dj.DistributedDataset`. Its elements are trees of PerReplica [G / R, ...],
          moved to the devices by a background thread; bare arrays where R is 1. The
          default strategy returns `dataset` itself, unless smaller batches are to be
          dropped or padded.

        Locality: T out. Context: cross-replica or default.

        Raises:
          BatchError: a batch that cannot be split; before the first element where the
            dataset has a length and items that tell.

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
        """Returns the elements that ``fn(InputContext)`` gives, one per replica and step.

        Nothing is split or batched anew: consecutive elements go to consecutive
        replicas.

        Args:
          fn: called once (one process has one input pipeline); returns an iterable of
            trees of arrays, of any rank, equal in shape within one step.
          options: a `dj.InputOptions`; it says what happens to a last step with missing
            or smaller elements.

        Returns:
          A `dj.DistributedDataset`, as `distribute_dataset` gives.

        Locality: T out. Context: cross-replica or default.

        Raises:
          BatchError: elements of one step that differ in shape or structure, or a last
            step with missing ones.

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
          fn: called once per replica, in order; returns a tree of arrays of equal
            shapes.

        Locality: T out; a strategy that never wraps returns the one value.
        Context: any. Source: tf.distribute
          `experimental_distribute_values_from_function`.
        """
        return self._extended.distribute_values_from_function(fn)

    def describe(self) -> StrategyDescription:
        """Returns devices, replicas and each variable's place and bytes, to be printed.

        Context: any. Cost: none, nothing is read or moved.

        Example:
          >>> strategy = dj.ShardedStrategy(jax.devices()[:2], partition="parameters")
          >>> with strategy.scope():
          ...     w = dj.Variable(jnp.zeros((4, 3)), name="w")
          >>> found = strategy.describe()
          >>> found.bytes_per_device, found.variables[0].placement
          (24, 'partitioned on axis 0')
          >>> print(found)
          ShardedStrategy(Topology(R=2 over 'replica' on 2 devices))
            replicas          2
            devices           2, one for each replica: ...
            variables         1
            bytes per device  24 B
          variables:
            name  shape   dtype    synchronization  aggregation  placement ...
            w     [4, 3]  float32  ON_WRITE         NONE         partitioned on axis 0  24 B
        """
        return describe(self._extended)

    def assert_mirrored(self, tree: PyTree) -> None:
        """Raises unless all copies of each value of `tree` are equal, bit by bit.

        JAX reads the first copy of a replicated array and compares none. NaN equals
        NaN. A split array is compared where it has copies.

        Args:
          tree: a tree of arrays and variables; other leaves have no copies.

        Context: cross-replica or default. Cost: every copy of this process is moved to
          the host.

        Raises:
          LocalityError: copies that differ (it names path, replica, first index and
            both values), or a value per replica (PerReplica, sync-on-read variable).
          ContextError: a traced value.

        Example:
          >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
          >>> state = strategy.extended.broadcast_to({"w": np.ones(3)})
          >>> strategy.assert_mirrored(state)
          >>> copies = [jax.device_put(np.float32(r), d) for r, d in enumerate(jax.devices()[:2])]
          >>> drifted = jax.make_array_from_single_device_arrays(
          ...     (), state["w"].sharding, copies)
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
