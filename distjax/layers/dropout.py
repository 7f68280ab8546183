"""Dropout whose mask differs per replica, or is the same on all."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax.context import frames
from distjax.context.expectation import expect
from distjax.errors import ContextError, describe_value, message
from distjax.placement.per_replica import is_per_replica
from distjax.typing import ArrayLike


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
            message(
                "dropout of a PerReplica needs cross-replica context of its strategy",
                got=frame.name,
                why="the active strategy says what one replica is",
                fix="with strategy.scope(): dropout(key, rate, x); or strategy.run(dropout, ...)",
            )
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
                why="the elements that stay are scaled by 1 / (1 - rate)",
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
                why="the elements that stay are scaled by 1 / (1 - rate), and rounded to integers "
                "their expectation would not be x",
                fix="dj.layers.dropout(key, rate, x.astype(jnp.float32))",
            )
        )
    fraction = 1.0 - rate  # a float, though the rate be 0
    kept = jax.random.bernoulli(key, fraction, x.shape)
    with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
        return jnp.where(kept, x / fraction, jnp.zeros_like(x)).astype(x.dtype)
