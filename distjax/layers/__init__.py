"""Distribution-aware layers."""

from distjax.layers.batch_normalization import BatchNormalization
from distjax.layers.dropout import dropout
from distjax.layers.statistics import Statistics, batch_statistics

__all__ = ["BatchNormalization", "Statistics", "batch_statistics", "dropout"]
