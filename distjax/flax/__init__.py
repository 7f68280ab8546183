"""Flax under a strategy: modules and train states as arguments of `run` and `dj.jit`."""

from distjax.flax.create import create, place
from distjax.flax.metric_rules import register_metric
from distjax.flax.rules import set_rule

__all__ = ["create", "place", "register_metric", "set_rule"]
