"""Optimizers: any optax transformation, with its state placed like the variables."""

from distjax._src.optim.averages import ExponentialMovingAverage
from distjax._src.optim.optimizer import Optimizer, reduce_gradients

__all__ = ["ExponentialMovingAverage", "Optimizer", "reduce_gradients"]
