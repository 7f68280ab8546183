"""Metrics: totals kept per replica, combined when they are read."""

from distjax.metrics.accuracy import Accuracy
from distjax.metrics.averages import Mean, Sum
from distjax.metrics.metric import Metric

__all__ = ["Accuracy", "Mean", "Metric", "Sum"]
