"""Flax under a strategy: modules and train states as arguments of `run` and `dj.jit`."""

from distjax.flax.create import create, place
from distjax.flax.gradients import apply_gradients, value_and_grad
from distjax.flax.metric_rules import register_metric
from distjax.flax.rules import set_rule
from distjax.flax.stacks import scan_layers

__all__ = [
    "apply_gradients",
    "create",
    "place",
    "register_metric",
    "scan_layers",
    "set_rule",
    "value_and_grad",
]
