"""run_steps_on_iterator in the reference interpreter: one step after the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from distjax.strategies.steps import MultiStepContext, require_steps
from distjax.typing import PyTree


def run_steps(
    fn: Callable[[MultiStepContext, Any], Any],
    iterator: Iterator[PyTree],
    iterations: int,
    initial_loop_values: Mapping[str, PyTree] | None,
) -> MultiStepContext:
    """Runs up to K steps: see `StrategyExtended.run_steps_on_iterator`."""
    iterations = require_steps(fn, iterator, iterations, initial_loop_values)
    context = MultiStepContext(initial_loop_values)
    for element in itertools.islice(iterator, iterations):
        is_carried = initial_loop_values is not None
        step = MultiStepContext(context.last_step_outputs if is_carried else None)
        fn(step, element)
        context.last_step_outputs.update(jax.tree.map(jnp.asarray, step.last_step_outputs))
        context.non_tensor_outputs.update(step.non_tensor_outputs)
        context.iterations += 1
    if context.iterations == 0:
        raise StopIteration
    return context
