"""Optimizers: any optax transformation, its state placed beside the variables."""

from distjax.optim.functional import reduce_gradients
from distjax.optim.optimizer import Optimizer

__all__ = ["Optimizer", "reduce_gradients"]
