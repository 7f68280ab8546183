"""Accuracy: how often the argmax of the logits equals the label."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distjax.errors import BatchError, message
from distjax.metrics.masking import divide_or_zero, masked_sum
from distjax.metrics.metric import Metric
from distjax.typing import ArrayLike


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
                message(
                    f"metric {self.name!r} needs logits [B, ..., C] and integer labels [B, ...]",
                    got=f"logits {logits.shape}, labels {labels.dtype}{list(labels.shape)}",
                    why="there is one label for each row of logits",
                    fix="metric.update(logits, labels); from one-hot: labels.argmax(-1)",
                )
            )
        with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
            hits = jnp.argmax(logits, axis=-1) == labels
        correct, count = masked_sum(hits, mask, jnp.int32)
        return {"correct": correct, "count": count}

    def compute(self, correct: jax.Array, count: jax.Array) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns ``correct / count``."""
        return divide_or_zero(correct, count)
