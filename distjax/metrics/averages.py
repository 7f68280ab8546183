"""Mean and Sum of values over all examples."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distjax.metrics.masking import divide_or_zero, masked_sum, require_numbers
from distjax.metrics.metric import Metric
from distjax.typing import ArrayLike, DTypeLike


class Mean(Metric):
    """The mean of all values: ``sum of values / their number``; 0 without values.

    Args:
      name: the name in messages.
      dtype: the dtype of the sum.

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

    def __init__(self, name: str = "mean", *, dtype: DTypeLike = jnp.float32):
        self._dtype = jnp.dtype(dtype)
        total = jax.ShapeDtypeStruct((), self._dtype)
        super().__init__(name, {"total": total, "count": jax.ShapeDtypeStruct((), jnp.int32)})

    def measure(self, values: ArrayLike, mask: ArrayLike | None = None) -> dict[str, Any]:
        """Returns the sum and count of `values` [B, ...] where `mask` [B] is True."""
        require_numbers(values, self.name)
        total, count = masked_sum(values, mask, self._dtype)
        return {"total": total, "count": count}

    def compute(self, total: jax.Array, count: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns ``total / count``."""
        return divide_or_zero(total, count)


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
        require_numbers(values, self.name)
        return {"total": masked_sum(values, mask, self._dtype)[0]}

    def compute(self, total: jax.Array) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the total."""
        return total
