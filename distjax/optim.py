"""Optimizers: any optax transformation, its state placed beside the variables."""

from distjax._src.optim.optimizer import Optimizer, reduce_gradients

__all__ = ["Optimizer", "reduce_gradients"]
