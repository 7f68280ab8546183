"""Optimizers: any optax transformation, its state placed beside the variables."""

from distjax._src.optim.averages import ExponentialMovingAverage
from distjax._src.optim.optimizer import Optimizer, reduce_gradients

__all__ = ["ExponentialMovingAverage", "Optimizer", "reduce_gradients"]
