"""Metric: the behavior common to all metrics, in each context."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax import user_mesh
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.context.frames import Frame
from distjax.errors import describe_value, message
from distjax.modes import VariableAggregation, VariableSynchronization
from distjax.placement.per_replica import is_per_replica
from distjax.strategies.values import is_mirrored
from distjax.typing import PyTree
from distjax.variables.conversion import rounded
from distjax.variables.variable import Variable


class Metric(abc.ABC):
    """A quantity made of totals: sums over all examples of all replicas.

    A custom metric implements two pure methods: `measure` returns what a batch adds to
    the totals, and `compute` returns the metric's value from the totals.

    Args:
      name: the name in messages; its variables are `name/total`.
      totals: shape and dtype of each total, by name.

    Locality: a component per replica (ON_READ, SUM).
    Context: created under the scope of the strategy that updates it.

    Example:
      >>> class Above(dj.metrics.Metric):
      ...     '''How many values are above a bound.'''
      ...     def __init__(self, bound):
      ...         self.bound = bound
      ...         super().__init__("above", {"count": jax.ShapeDtypeStruct((), jnp.int32)})
      ...     def measure(self, values, mask=None):
      ...         return {"count": jnp.sum(values > self.bound, dtype=jnp.int32)}
      ...     def compute(self, count):
      ...         return count
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     above = Above(1.5)
      >>> strategy.run(above.update, args=(jnp.array([1.0, 2.0, 3.0]),))
      >>> int(above.result())
      4

    Source: tf.keras.metrics.Metric; tf.distribute.StrategyExtended, "Sync on
      read variables" (TF 1.15).
    """

    #: What shows that another metric took its place: see `objects/reached`.
    reached_parts = ("variables",)

    def __init__(self, name: str, totals: Mapping[str, jax.ShapeDtypeStruct]):
        self.name = name
        self.variables = {
            key: Variable(
                np.zeros(total.shape, total.dtype),
                name=f"{name}/{key}",
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )
            for key, total in totals.items()
        }
        self._strategy = frames.current().strategy

    @abc.abstractmethod
    def measure(self, *args: PyTree, **kwargs: PyTree) -> Mapping[str, Any]:
        """Returns what one replica's batch adds to each total, by name."""

    @abc.abstractmethod
    def compute(self, **totals: jax.Array) -> Any:
        """Returns the metric's value from the totals over all replicas."""

    def update(self, *args: PyTree, **kwargs: PyTree) -> None:
        """Adds a batch to the totals.

        Args:
          *args: the arguments of `measure`. In cross-replica context a PerReplica
            is added component by component, a mirrored array as R equal copies, and
            Python and numpy values once.
          **kwargs: likewise.

        Locality: T or M in. Context: any.
        Cost: no collective.

        Raises:
          ValueError: in cross-replica context, a JAX array that is not on the replicas;
            a `measure` that does not return the totals.
        """
        own, frame = self._strategy, frames.current()
        if own.extended.is_default or _is_replica_of(own, frame):
            self._add_here(*args, **kwargs)
        elif self._counts_once((args, kwargs)):
            own.run(self._add_on_first_replica, args, kwargs)
        else:
            own.run(self._add_here, args, kwargs)

    def result(self) -> Any:
        """Returns the metric's value over all replicas.

        The totals are all-reduced in a replica context and aggregated in
        cross-replica context, where closures that add to them end first.

        Locality: M out. Context: any. Cost: one all-reduce per total.
        """
        if self._strategy.extended.is_default:  # its code may name the user's mesh
            return self._compute_here()
        return user_mesh.ignores_user_mesh(self._compute_here)()

    def _compute_here(self) -> Any:
        own, frame = self._strategy, frames.current()
        with self._between_closures():
            totals = {key: v.value for key, v in self.variables.items()}
        is_one = any(v.policy.merges for v in self.variables.values())  # for all replicas
        if _is_replica_of(own, frame) and not is_one:
            totals = frame.replica_context.all_reduce("sum", totals)
        return self.compute(**totals)

    def kept_variables(self) -> dict[str, Variable]:
        """Returns the variables to checkpoint: the totals."""
        return self.variables

    def reset(self) -> None:
        """Sets the totals to zero. Context: any; a replica sets its own component."""
        with self._between_closures():
            for variable in self.variables.values():
                variable.write(np.zeros(variable.shape, variable.dtype))

    def _between_closures(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the totals belong together: each batch is in all or none."""
        is_traced = frames.current().state is not None
        return contextlib.nullcontext() if is_traced else self._strategy.extended.pause_writers()

    # -- adding ---------------------------------------------------------------

    def _add_here(self, *args: PyTree, **kwargs: PyTree) -> None:
        for key, amount in self._require_totals(self.measure(*args, **kwargs)).items():
            self.variables[key].assign_add(rounded(amount, self.variables[key].dtype))

    def _add_on_first_replica(self, *args: PyTree, **kwargs: PyTree) -> None:
        replica = frames.current().replica_context.replica_id_in_sync_group
        for key, amount in self._require_totals(self.measure(*args, **kwargs)).items():
            amount = jnp.asarray(amount)
            own = jnp.where(replica == 0, amount, jnp.zeros_like(amount))
            self.variables[key].assign_add(rounded(own, self.variables[key].dtype))

    def _require_totals(self, measured: object) -> Mapping[str, Any]:
        if isinstance(measured, Mapping) and set(measured) == set(self.variables):
            return measured
        got = sorted(measured) if isinstance(measured, Mapping) else describe_value(measured)
        raise ValueError(
            message(
                f"measure of metric {self.name!r} needs to return its totals, by name",
                got=f"{got}",
                why="each amount is added to the total of its name",
                fix=f"return a dict with the keys {sorted(self.variables)}",
            )
        )

    def _counts_once(self, batch: PyTree) -> bool:
        """Returns whether a batch in cross-replica context counts once, not per replica."""
        topology = self._strategy.extended.topology
        leaves = jax.tree.leaves(batch, is_leaf=is_per_replica)
        if any(is_per_replica(x) or is_mirrored(topology, x) for x in leaves):
            return False
        elsewhere = [x for x in leaves if isinstance(x, jax.Array)]
        if elsewhere and topology.num_replicas > 1:
            raise ValueError(
                message(
                    f"update of metric {self.name!r} in cross-replica context needs values on the "
                    "replicas, or host values",
                    got=f"{describe_value(elsewhere[0])}, which lives elsewhere",
                    why="it is unclear whether it stands for one batch or for R equal ones",
                    fix="return it from strategy.run; or metric.update(np.asarray(x)), which "
                    "counts once",
                )
            )
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, of {self._strategy!r})"


def _is_replica_of(strategy: StrategyLike, frame: Frame) -> bool:
    return frame.replica_context is not None and frame.strategy is strategy
