"""Distribution-aware layers: batch normalization over the global batch, and dropout.

The statistics take two all-reduces instead of one, since `mean(x^2) - mean(x)^2` cancels if the
mean is large, and the result would differ from that of one device. A variable cannot be written
inside `jax.grad`, so `normalize` returns them as an auxiliary result, and `update` writes them
outside. If the mask keeps no example, the moving statistics do not change, as with an empty batch
in TensorFlow; its mean of 0 would pull them towards 0. `update` detects this by `Statistics.count`,
which is equal on every replica if synchronized: writing back the old values would look, to the
proof, like statistics that differ per replica.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src.collectives.ops import sum_dtype
from distjax._src.context import expect, frames
from distjax._src.masks import broadcast_mask
from distjax._src.placement import is_per_replica
from distjax._src.typing import ArrayLike, PyTree, VariableAggregation, VariableSynchronization
from distjax._src.variables.conversion import rounded
from distjax._src.variables.variable import Variable
from distjax.errors import BatchError, ContextError, describe_value, message, require_int

__all__ = ["BatchNormalization", "Statistics", "batch_statistics", "dropout"]


def __dir__() -> list[str]:
    return sorted(__all__)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """Per-feature mean and (biased) variance [C] of a batch; unpacks to these two.

    Attributes:
      mean: the mean; 0 of no values.
      variance: the variance; 0 of no values.
      count: the number of values of each feature that they are over, [].
    """

    mean: Any
    variance: Any
    count: Any = 1

    def __iter__(self) -> Iterator[Any]:
        return iter((self.mean, self.variance))

    def __getitem__(self, index: int) -> Any:
        return (self.mean, self.variance)[index]


def batch_statistics(
    x: ArrayLike, mask: ArrayLike | None = None, *, synchronized: bool = True
) -> Statistics:
    """Returns the mean and variance of each feature over the global batch.

    ``mean = sum(x) / n`` and ``variance = sum((x - mean)^2) / n``, with sums and n
    over the examples of all replicas: the statistics of the whole batch on one device.
    The variance takes a second all-reduce: from ``mean(x^2) - mean(x)^2`` a large mean
    would cancel it.

    Args:
      x: [B, ..., C].
      mask: bool [B] (or any leading part of the shape of `x`): which examples
        count.
      synchronized: if False, over this replica's batch alone.

    Locality: T or M in; M out if synchronized. Context: replica or default; in
      cross-replica context, over the given array alone.
    Cost: two all-reduces of [C], and one of the count if there is a mask.

    Raises:
      BatchError: a mask of the wrong dtype or shape.
    """
    x = jnp.asarray(x)
    x = x.astype(sum_dtype(x.dtype))
    axes = tuple(range(x.ndim - 1))
    context = frames.current().replica_context if synchronized else None

    def over_all(value: jax.Array) -> jax.Array:
        return value if context is None else context.all_reduce("sum", value)

    if mask is None:  # the shape is the same on all replicas
        num_replicas = 1 if context is None else context.num_replicas_in_sync
        kept, count = None, jnp.asarray(x[..., 0].size, x.dtype) * num_replicas
    else:
        fix = "batch_norm(batch.data, training=True, mask=batch.mask)"
        kept = broadcast_mask(mask, x.shape[:-1], "batch_statistics: mask", fix)
        count = over_all(jnp.sum(kept, dtype=x.dtype))

    def mean_of(values: jax.Array) -> jax.Array:
        if kept is not None:
            values = jnp.where(kept[..., None], values, jnp.zeros_like(values))
        return over_all(jnp.sum(values, axis=axes)) / jnp.maximum(count, 1)

    mean = mean_of(x)
    centered = x - jnp.expand_dims(mean, axes)  # explicitly, for jax_numpy_rank_promotion
    return Statistics(mean, mean_of(jnp.square(centered)), count)


#: Numbers of the host.
_NUMBERS = (int, float, np.integer, np.floating)


class BatchNormalization:
    """Normalizes each feature by its statistics over the batches of all replicas.

    ``y = gamma * (x - mean) / sqrt(variance + epsilon) + beta``, with the numbers and
    gradients that one device gets from the whole batch.

    The moving statistics are sync-on-read variables with aggregation MEAN: writing them
    needs no communication, and reading them returns the mean of their components, which
    differ only without synchronization.

    Args:
      num_features: C, the size of the last axis.
      momentum: the fraction of the moving statistics kept in each step, in [0, 1].
      epsilon: added to the variance.
      synchronized: if False, each replica normalizes by its own batch.
      name: prefix of the variables' names.

    Raises:
      ValueError: `num_features` is not a positive int, or `momentum` not in [0, 1].

    Locality: gamma, beta mirrored; moving statistics one component per replica.
    Context: any; in cross-replica context a PerReplica is passed through `run`.

    Example:
      A variable cannot be written inside `jax.grad`: return the statistics from it, and
      call `update` outside.

      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     norm = dj.layers.BatchNormalization(1)
      >>> def step(x):
      ...     def loss(parameters):
      ...         y, statistics = norm.normalize(x, parameters=parameters)
      ...         return jnp.mean(y), statistics
      ...     parameters = {k: v.value for k, v in norm.parameters.items()}
      ...     grads, statistics = jax.grad(loss, has_aux=True)(parameters)
      ...     norm.update(statistics)
      ...     return statistics.mean
      >>> strategy.run(step, args=(jnp.array([[1.0], [3.0]]),))
      Array([2.], dtype=float32)

    Source: Ioffe and Szegedy, 2015; tf.keras.layers.BatchNormalization
      (synchronized=True); tf.distribute.StrategyExtended, "Distribute-aware
      layers" (TF 1.15).
    """

    def __init__(
        self,
        num_features: int,
        *,
        momentum: float = 0.99,
        epsilon: float = 1e-3,
        synchronized: bool = True,
        name: str = "batch_norm",
    ):
        _require_arguments(num_features, momentum)
        self.num_features = num_features
        self.momentum, self.epsilon, self.synchronized = momentum, epsilon, synchronized
        self.gamma = Variable(np.ones(num_features, np.float32), name=f"{name}/gamma")
        self.beta = Variable(np.zeros(num_features, np.float32), name=f"{name}/beta")
        self.moving_mean = _moving(np.zeros(num_features, np.float32), f"{name}/moving_mean")
        self.moving_variance = _moving(np.ones(num_features, np.float32), f"{name}/moving_variance")

    def __repr__(self) -> str:
        return f"BatchNormalization({self.num_features}, synchronized={self.synchronized})"

    @property
    def parameters(self) -> dict[str, Variable]:
        """The trainable variables, keyed as `normalize` takes their values."""
        return {"gamma": self.gamma, "beta": self.beta}

    def __call__(self, x: ArrayLike, *, training: bool, mask: ArrayLike | None = None) -> Any:
        """Returns `x` normalized; in training, updates the moving statistics.

        Args:
          x: [B, ..., C], or a PerReplica of such.
          training: whether to normalize by the batch instead of the moving statistics.
          mask: bool [B]: which examples count in the batch's statistics.

        Locality: T or M in, the same out. Context: any, but not inside `jax.grad`
          when training (see `normalize`).
        Cost: in training, the all-reduces of `batch_statistics`.

        Raises:
          BatchError: a wrong number of features, or a mask of the wrong dtype or shape.
        """
        if not training:
            return self._through_run(self._infer, x)
        y, statistics = self.normalize(x, mask)
        self.update(statistics)
        return y

    def normalize(
        self,
        x: ArrayLike,
        mask: ArrayLike | None = None,
        *,
        parameters: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Statistics]:
        """Returns `x` normalized by its batch, and the batch's statistics.

        Writes nothing, so it may be called inside `jax.grad`.

        Args:
          x: [B, ..., C], or a PerReplica of such.
          mask: bool [B]: which examples count in the statistics.
          parameters: values of gamma and beta [C], to differentiate with respect to;
            default: the variables' values.

        Locality: T or M in; out x has the same, statistics M (T if not synchronized).
        """
        if parameters is None:
            parameters = {key: v.value for key, v in self.parameters.items()}
        return self._through_run(self._normalize_here, x, mask, dict(parameters))

    def update(self, statistics: Statistics) -> None:
        """Moves the moving statistics towards those of a batch, unless it has no examples.

        Locality: T or M in a replica, M or PerReplica outside. Cost: no collective.
        """
        self._through_run(self._update_here, statistics)

    # -- in one context -------------------------------------------------------

    def _through_run(self, fn: Callable[..., Any], *args: PyTree) -> Any:
        """Calls ``fn`` here, or through `run` if an argument is a PerReplica."""
        own, frame = self.gamma.strategy, frames.current()
        is_outside = frame.replica_context is None or frame.strategy is not own
        varying = any(is_per_replica(x) for x in jax.tree.leaves(args, is_leaf=is_per_replica))
        return own.run(fn, args) if is_outside and varying else fn(*args)

    def _normalize_here(
        self, x: ArrayLike, mask: ArrayLike | None, parameters: Mapping[str, Any]
    ) -> Any:
        x = self._check_input(x)
        statistics = batch_statistics(x, mask, synchronized=self.synchronized)
        if mask is not None and not self.synchronized:  # a batch may well be padding alone
            moving = self.moving_mean.value, self.moving_variance.value
            pairs = zip(statistics, moving, strict=True)
            has_any = statistics.count > 0
            mean, variance = (jnp.where(has_any, new, old.astype(new.dtype)) for new, old in pairs)
            statistics = Statistics(mean, variance, statistics.count)
        return self._transform(x, statistics, parameters), statistics

    def _infer(self, x: ArrayLike) -> Any:
        statistics = Statistics(self.moving_mean.value, self.moving_variance.value)
        parameters = {key: v.value for key, v in self.parameters.items()}
        return self._transform(self._check_input(x), statistics, parameters)

    def _update_here(self, statistics: Statistics) -> None:
        has_any = jnp.asarray(statistics.count) > 0  # padding alone must not move them
        pairs = zip((self.moving_mean, self.moving_variance), statistics, strict=True)
        for moving, new in pairs:
            old = moving.value
            with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
                moved = self.momentum * old + (1 - self.momentum) * new
                moved = jnp.where(has_any, moved, old)
            moving.assign(rounded(moved, moving.dtype))

    def _transform(
        self, x: jax.Array, statistics: Statistics, parameters: Mapping[str, Any]
    ) -> jax.Array:
        axes = tuple(range(x.ndim - 1))  # explicitly, for jax_numpy_rank_promotion
        with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
            scale = parameters["gamma"] * jax.lax.rsqrt(statistics.variance + self.epsilon)
            features = (statistics.mean, scale, parameters["beta"])
            mean, scale, beta = (jnp.expand_dims(values, axes) for values in features)
            return ((x - mean) * scale + beta).astype(x.dtype)

    def _check_input(self, x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        if x.ndim >= 2 and x.shape[-1] == self.num_features:
            return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
        raise BatchError(
            f"BatchNormalization needs [B, ..., {self.num_features}] per replica",
            got=describe_value(x),
            why="the last axis holds the features, the first the examples",
            fix=f"dj.layers.BatchNormalization({x.shape[-1] if x.ndim else 1}), or move the "
            "features to the last axis",
        )


def _require_arguments(num_features: object, momentum: object) -> None:
    require_int(
        "BatchNormalization: num_features",
        num_features,
        1,
        why="it is the size of the last axis, of which each index has its own statistics",
        fix="dj.layers.BatchNormalization(x.shape[-1])",
    )
    is_checked = not isinstance(momentum, jax.Array)  # reading one would wait for its device
    if is_checked and not (isinstance(momentum, _NUMBERS) and 0 <= momentum <= 1):
        raise ValueError(
            message(
                "BatchNormalization: momentum needs a number from 0 to 1",
                got=describe_value(momentum),
                why="it is the fraction of the moving statistics that a step keeps",
                fix="dj.layers.BatchNormalization(num_features, momentum=0.99)",
            )
        )


def _moving(initial: np.ndarray, name: str) -> Variable:
    return Variable(
        initial,
        name=name,
        synchronization=VariableSynchronization.ON_READ,
        aggregation=VariableAggregation.MEAN,
    )


def dropout(key: jax.Array, rate: ArrayLike, x: ArrayLike, *, synchronized: bool = False) -> Any:
    """Returns `x` with a fraction of its elements zeroed and the others scaled up.

    Computes ``x * m / (1 - rate)`` with m drawn from Bernoulli(1 - rate); the
    expectation is `x`.

    Args:
      key: a PRNG key, equal on every replica.
      rate: the fraction to drop, in [0, 1); the values of a JAX array are not checked.
      x: [B, ...], of floats; in cross-replica context also a PerReplica of such.
      synchronized: whether all replicas draw the same mask. If not, the replica's number
        is folded into the key, and each draws its own.

    Locality: T or M in; T out, or the locality of `x` if synchronized.
    Context: any. In cross-replica context it goes through `strategy.run`, and a single
      array comes back as a PerReplica, or Mirrored if synchronized.
    Cost: no collective.

    Raises:
      ValueError: a rate outside [0, 1).
      TypeError: `x` of integers or bools.
      ContextError: a PerReplica with no active strategy.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> def step(x):
      ...     return dj.layers.dropout(jax.random.key(0), 0.5, x, synchronized=True)
      >>> same = strategy.run(step, args=(jnp.ones(8),))
      >>> isinstance(same, jax.Array)
      True

    Source: Srivastava et al., 2014; tf.distribute.StrategyExtended,
      "Distribute-aware layers" (TF 1.15).
    """
    _require_rate(rate)
    frame = frames.current()
    apply = _with_one_mask if synchronized else _with_own_mask
    if frame.replica_context is None:
        return frame.strategy.run(apply, args=(key, rate, x))
    if is_per_replica(x):
        raise ContextError(
            "dropout of a PerReplica needs cross-replica context of its strategy",
            got=frame.name,
            why="the active strategy says what one replica is",
            fix="with strategy.scope(): dropout(key, rate, x); or strategy.run(dropout, ...)",
        )
    return apply(key, rate, x)


def _require_rate(rate: ArrayLike) -> None:
    if not isinstance(rate, (numbers.Real, np.generic, np.ndarray)):
        return  # reading an array of JAX's would wait for its device
    rates = np.asarray(rate)
    outside = rates[~((rates >= 0) & (rates < 1))]  # NaN too
    if outside.size:
        raise ValueError(
            message(
                "dropout: rate needs to be at least 0 and less than 1",
                got=str(outside[0]),
                why="the elements that are kept are scaled by 1 / (1 - rate)",
                fix="dj.layers.dropout(key, 0.1, x)",
            )
        )


def _with_own_mask(key: jax.Array, rate: ArrayLike, x: ArrayLike) -> jax.Array:
    return _drop(frames.current().replica_context.fold_in(key), rate, x)


def _with_one_mask(key: jax.Array, rate: ArrayLike, x: ArrayLike) -> jax.Array:
    with expect("dropout(..., synchronized=True)"):
        return _drop(key, rate, x)


def _drop(key: jax.Array, rate: ArrayLike, x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise TypeError(
            message(
                "dropout: x needs floating-point values",
                got=describe_value(x),
                why="the elements that are kept are scaled by 1 / (1 - rate), and rounded to "
                "integers their expectation would not be x",
                fix="dj.layers.dropout(key, rate, x.astype(jnp.float32))",
            )
        )
    fraction = 1.0 - rate  # a float, though the rate be 0
    kept = jax.random.bernoulli(key, fraction, x.shape)
    with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
        return jnp.where(kept, x / fraction, jnp.zeros_like(x)).astype(x.dtype)
