"""Optimizers: any optax transformation, with its state placed where it belongs."""

from distjax.optim.functional import reduce_gradients
from distjax.optim.optimizer import Optimizer

__all__ = ["Optimizer", "reduce_gradients"]
