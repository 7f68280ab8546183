"""Metrics: totals per replica, combined when they are read.

The totals are sync-on-read variables: `update` runs at every step and needs no communication;
`result` runs rarely and all-reduces once per total. Counts are integers: a float32 count stops
growing at 2^24 examples. Totals have to be read and reset together, or their ratio is meaningless:
under parameter servers, where closures may add to them, `result` and `reset` pause the workers.

In cross-replica context, a PerReplica is added component by component, and a mirrored array as R
equal copies, so that proving a value equal does not change a metric. A host value is one batch and
counts once. A JAX array that is not on the replicas could be either, so it is rejected.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import user_mesh
from distjax._src.collectives.ops import sum_dtype
from distjax._src.context import Frame, StrategyLike, frames
from distjax._src.masks import broadcast_mask, spread_mask
from distjax._src.placement import is_per_replica, require_held
from distjax._src.strategies.values import is_mirrored
from distjax._src.typing import (
    ArrayLike,
    DTypeLike,
    PyTree,
    VariableAggregation,
    VariableSynchronization,
)
from distjax._src.variables.conversion import rounded
from distjax._src.variables.storage import call_or_undo
from distjax._src.variables.variable import Variable
from distjax.errors import BatchError, describe_value, message, require

__all__ = ["Accuracy", "Mean", "Metric", "Sum"]


def __dir__() -> list[str]:
    return sorted(__all__)


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
        if own.extended.is_default:  # a total at a time, but all or none of them
            call_or_undo(frame, lambda: self._add_here(*args, **kwargs))
        elif _is_replica_of(own, frame):
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
            call_or_undo(frames.current(), self._write_zeros)

    def _write_zeros(self) -> None:
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


class Mean(Metric):
    """The mean of all values: ``sum of values / their number``; 0 without values.

    Args:
      name: the name in messages.
      dtype: the dtype of the sum.
      weighted: whether values have weights: ``sum of weights * values / sum of weights``, both
        summed in `dtype`.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     loss = dj.metrics.Mean("loss")
      >>> def step(x, mask):
      ...     loss.update(x, mask=mask)
      >>> strategy.run(step, args=(jnp.array([1.0, 3.0, 8.0]), jnp.array([True, True, False])))
      >>> float(loss.result())
      2.0

    Source: tf.keras.metrics.Mean.
    """

    def __init__(
        self, name: str = "mean", *, dtype: DTypeLike = jnp.float32, weighted: bool = False
    ):
        self._dtype, self._weighted = jnp.dtype(dtype), weighted
        total = jax.ShapeDtypeStruct((), self._dtype)
        count = total if weighted else jax.ShapeDtypeStruct((), jnp.int32)
        super().__init__(name, {"total": total, "count": count})

    def measure(
        self,
        values: ArrayLike,
        mask: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> dict[str, Any]:
        """Returns the sum and count of `values` [B, ...] where `mask` [B] is True.

        Of a weighted mean, the sums of `weights` times values, and of `weights`: numbers of the
        shape of `values`, or of any leading part of it. A token's loss counts by its weight with
        ``metric.update(losses, weights=token_weights)``.
        """
        _require_numbers(values, self.name)
        if not self._weighted:
            require(
                weights is None,
                f"metric {self.name!r} needs to be weighted to take weights",
                got="weights=",
                why="it counts its values in an integer",
                fix=f"dj.metrics.Mean({self.name!r}, weighted=True)",
                error=TypeError,
            )
            total, count = _masked_sum(values, mask, self._dtype)
            return {"total": total, "count": count}
        require(
            weights is not None,
            f"weighted metric {self.name!r} needs weights",
            got="values alone",
            why="a mean of weighted and unweighted values is meaningless",
            fix="metric.update(losses, weights=token_weights)",
            error=TypeError,
        )
        values = jnp.asarray(values, self._dtype)
        weights = jnp.asarray(weights, self._dtype)
        if weights.shape != values.shape[: weights.ndim]:
            raise BatchError(
                f"weighted metric {self.name!r} needs weights of a leading part of the shape "
                "of its values",
                got=f"weights {list(weights.shape)}, values {list(values.shape)}",
                why="each value has a weight",
                fix="metric.update(losses, weights=token_weights)",
            )
        each = jnp.broadcast_to(spread_mask(weights, values.shape), values.shape)
        total, _ = _masked_sum(
            values.astype(self._dtype) * each.astype(self._dtype), mask, self._dtype
        )
        return {"total": total, "count": _masked_sum(each, mask, self._dtype)[0]}

    def compute(self, total: jax.Array, count: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns ``total / count``."""
        return _divide_or_zero(total, count)


class Sum(Metric):
    """The sum of all values.

    Args:
      name: the name in messages.
      dtype: the dtype of the sum.

    Source: tf.keras.metrics.Sum.
    """

    def __init__(self, name: str = "sum", *, dtype: DTypeLike = jnp.float32):
        self._dtype = jnp.dtype(dtype)
        super().__init__(name, {"total": jax.ShapeDtypeStruct((), self._dtype)})

    def measure(self, values: ArrayLike, mask: ArrayLike | None = None) -> dict[str, Any]:
        """Returns the sum of `values` [B, ...] where `mask` [B] is True."""
        _require_numbers(values, self.name)
        return {"total": _masked_sum(values, mask, self._dtype)[0]}

    def compute(self, total: jax.Array) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the total."""
        return total


class Accuracy(Metric):
    """The fraction of examples whose largest logit is the label's; 0 without examples.

    Args:
      name: the name in messages.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     accuracy = dj.metrics.Accuracy()
      >>> logits, labels = jnp.array([[0.1, 0.9], [0.8, 0.2]]), jnp.array([1, 1])
      >>> strategy.run(accuracy.update, args=(logits, labels))
      >>> float(accuracy.result())
      0.5

    Source: tf.keras.metrics.SparseCategoricalAccuracy.
    """

    def __init__(self, name: str = "accuracy"):
        count = jax.ShapeDtypeStruct((), jnp.int32)
        super().__init__(name, {"correct": count, "count": count})

    def measure(
        self, logits: ArrayLike, labels: ArrayLike, mask: ArrayLike | None = None
    ) -> dict[str, Any]:
        """Returns the number of correct predictions and the number of examples.

        Args:
          logits: [B, ..., C] scores of C classes.
          labels: integers [B, ...].
          mask: bool [B]: which examples count.
        """
        logits, labels = jnp.asarray(logits), jnp.asarray(labels)
        is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
        if logits.ndim == 0 or labels.shape != logits.shape[:-1] or not is_integer:
            raise BatchError(
                f"metric {self.name!r} needs logits [B, ..., C] and integer labels [B, ...]",
                got=f"logits {logits.shape}, labels {labels.dtype}{list(labels.shape)}",
                why="there is one label for each row of logits",
                fix="metric.update(logits, labels); from one-hot: labels.argmax(-1)",
            )
        with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
            hits = jnp.argmax(logits, axis=-1) == labels
        correct, count = _masked_sum(hits, mask, jnp.int32)
        return {"correct": correct, "count": count}

    def compute(self, correct: jax.Array, count: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns ``correct / count``."""
        return _divide_or_zero(correct, count)


# -- totals of a batch ------------------------------------------------------------


def _require_numbers(values: object, name: str) -> None:
    """Raises a TypeError if `values`, for the metric of this name, cannot be an array.

    An OverflowError for host integers that JAX cannot hold.
    """
    require_held(values, f"update of metric {name!r}")
    if not (values is None or isinstance(values, (str, bytes, Mapping))):
        return
    raise TypeError(
        message(
            f"update of metric {name!r} needs an array of numbers",
            got=describe_value(values),
            why="the metric is made of the sum of its values",
            fix="metric.update(loss); of a dict of losses: a metric for each, or metric.update(sum("
            "losses.values()))",
        )
    )


# Compiled, since eager constants would be transfers, which a transfer guard may disallow.
@functools.partial(jax.jit, static_argnums=2)
def _masked_sum(
    values: ArrayLike, mask: ArrayLike | None, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum and the count of the values that the mask keeps.

    Args:
      values: [B, ...], or a number.
      mask: bool [B], or any leading part of the shape of `values`; None keeps
        all. Masked-out values may be NaN.
      dtype: the dtype of the total; the sum is computed in the wider of it and
        the dtype of `values`.

    Returns:
      (sum, count as int32), both [].

    Raises:
      BatchError: a mask of the wrong dtype or shape.
    """
    values = jnp.asarray(values)
    with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
        wide = jnp.promote_types(values.dtype, dtype)
    if mask is None:
        return jnp.sum(values.astype(wide)), jnp.asarray(values.size, jnp.int32)
    fix = "metric.update(batch_values, mask=batch.mask)"
    kept = broadcast_mask(mask, values.shape, "a metric's mask", fix)
    chosen = jnp.where(kept, values, jnp.zeros_like(values))
    return jnp.sum(chosen.astype(wide)), jnp.sum(kept.astype(jnp.int32))


@jax.jit
def _divide_or_zero(total: ArrayLike, count: ArrayLike) -> jax.Array:
    """Returns ``total / count``; 0 if `count` is 0, NaN if it is negative (it wrapped around)."""
    total, count = jnp.asarray(total), jnp.asarray(count)
    dtype = total.dtype if jnp.issubdtype(total.dtype, jnp.inexact) else None
    if dtype is not None:
        wide = sum_dtype(dtype)
        total, count = total.astype(wide), count.astype(wide)
    quotient = total / jnp.where(count == 0, 1, count)
    quotient = jnp.where(count < 0, jnp.full_like(quotient, jnp.nan), quotient)
    quotient = jnp.where(count == 0, jnp.zeros_like(quotient), quotient)
    return quotient if dtype is None else quotient.astype(dtype)
