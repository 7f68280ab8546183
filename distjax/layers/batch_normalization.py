"""Batch normalization over the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax.context import frames
from distjax.errors import BatchError, describe_value, message
from distjax.integers import require_int
from distjax.layers.statistics import Statistics, batch_statistics
from distjax.modes import VariableAggregation, VariableSynchronization
from distjax.placement.per_replica import is_per_replica
from distjax.typing import ArrayLike, PyTree
from distjax.variables.conversion import rounded
from distjax.variables.variable import Variable

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
        self._through_run(self._update_here, *statistics, statistics.count)

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

    def _update_here(self, mean: jax.Array, variance: jax.Array, count: jax.Array) -> None:
        has_any = jnp.asarray(count) > 0  # padding alone must not move them
        for moving, new in ((self.moving_mean, mean), (self.moving_variance, variance)):
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
            message(
                f"BatchNormalization needs [B, ..., {self.num_features}] per replica",
                got=describe_value(x),
                why="the last axis holds the features, the first the examples",
                fix=f"dj.layers.BatchNormalization({x.shape[-1] if x.ndim else 1}), or move the "
                "features to the last axis",
            )
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
