"""Flax under a strategy: modules and train states as arguments of `run` and `dj.jit`."""

from distjax._src.flax.create import create, from_replicated, place, to_replicated
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
    "from_replicated",
    "place",
    "register_metric",
    "scan_layers",
    "set_rule",
    "to_replicated",
    "value_and_grad",
]
