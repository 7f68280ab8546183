"""Flax under a strategy: modules and train states as arguments of `run` and `dj.jit`."""

from distjax.flax.create import create, place
from distjax.flax.gradients import apply_gradients, value_and_grad
from distjax.flax.loss_scale import LossScale
from distjax.flax.metric_rules import register_metric
from distjax.flax.precision import cast
from distjax.flax.replicated import from_replicated, to_replicated
from distjax.flax.rules import set_rule
from distjax.flax.stacks import scan_layers

__all__ = [
    "LossScale",
    "apply_gradients",
    "cast",
    "create",
    "from_replicated",
    "place",
    "register_metric",
    "scan_layers",
    "set_rule",
    "to_replicated",
    "value_and_grad",
]
