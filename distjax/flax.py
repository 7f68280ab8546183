"""Flax under a strategy: modules and train states as arguments of `run` and `dj.jit`."""

from distjax._src.flax.create import create, place
from distjax._src.flax.gradients import (
    LossScale,
    apply_gradients,
    cast,
    scan_layers,
    value_and_grad,
)
from distjax._src.flax.rules import register_metric, set_rule

__all__ = [
    "LossScale",
    "apply_gradients",
    "cast",
    "create",
    "place",
    "register_metric",
    "scan_layers",
    "set_rule",
    "value_and_grad",
]
