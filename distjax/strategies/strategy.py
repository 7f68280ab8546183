"""Strategy: the thin face of a StrategyExtended."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jax.sharding import Mesh

from distjax.strategies import scoping
from distjax.strategies.extended import StrategyExtended


class Strategy:
    """Where replicas run, where variables live, and how values meet.

    A subclass only builds its StrategyExtended: ``super().__init__(extended)``
    with the parts it picks. All logic is in `extended`.

    Source: tf.distribute.Strategy; seed 001.
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

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Enters cross-replica context; variables made inside belong to this strategy.

        Raises:
          StrategyMismatchError: another strategy is in force.
          ContextError: in a replica context, or when left out of order.
        """
        with scoping.scope(self):
            yield self

    def run(
        self, fn: Callable[..., Any], args: Any = (), kwargs: dict[str, Any] | None = None
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
          where not; Python objects and variables as they are.

        Locality: T, M and variables in; M or T out. Context: cross-replica or
          default.
        Example:
          >>> strategy = dj.VirtualStrategy(2)
          >>> def fn(three):
          ...     ctx = dj.get_replica_context()
          ...     v = three + ctx.replica_id_in_sync_group
          ...     return v, ctx.all_reduce("sum", v)
          >>> v, total = strategy.run(fn, args=(3,))
          >>> strategy.local_results(v), total
          ((Array(3, dtype=int32), Array(4, dtype=int32)), Array(7, dtype=int32))

        Source: tf.distribute.Strategy.run; `call_for_each_replica` of seed 001.
        """
        return self._extended.call_for_each_replica(fn, args, kwargs)

    def reduce(self, op: Any, value: Any, axis: Any = None, mask: Any = None) -> Any:
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
          ValueError: SUM of a value that is not on the replicas.
          LocalityError: SUM of a mirrored variable.
        Source: tf.distribute.Strategy.reduce.
        """
        return self._extended.reduce(op, value, axis, mask)

    def gather(self, value: Any, axis: int) -> Any:
        """Returns the replicas' values end to end along `axis`.

        Locality: T or M in, M out. Context: cross-replica or default.
        Cost: an all-gather per value.
        """
        return self._extended.gather(value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of the replicas of this process, in replica order.

        R arrays for a PerReplica or a Mirrored array, the components of a
        variable, a 1-tuple for anything else; a tuple of trees for a tree.
        """
        return self._extended.local_results(value)

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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._extended.topology!r})"

    def __copy__(self) -> NoReturn:
        self._extended.refuse_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._extended.refuse_copy()
