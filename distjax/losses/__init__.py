"""Losses that are independent of the number of replicas and of padding."""

from distjax.losses.average import average_loss

__all__ = ["average_loss"]
