"""Losses that do not depend on the number of replicas or on padding."""

from distjax.losses.average import average_loss

__all__ = ["average_loss"]
