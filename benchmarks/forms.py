"""The ways to write one training step, as functions that lower it anew at each call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

import distjax as dj
from benchmarks import handwritten, models, ours

# Defines the step anew, so that no cache has its function, and lowers it.
Lower = Callable[[], jax.stages.Lowered]


def lower_handwritten(model: models.Model, devices: Sequence[jax.Device], batch_size: int) -> Lower:
    """The step by hand, state donated.

    Args:
      model: The model to train.
      devices: One replica on each.
      batch_size: Examples per replica.

    Returns:
      A function that lowers the step; state and batch are made beforehand.
    """
    mesh = handwritten.make_mesh(devices)
    state = handwritten.replicate(models.initial_state(model), mesh)
    batch = handwritten.split(model.batch(batch_size * len(devices)), mesh)
    return lambda: handwritten.make_step(model, mesh).lower(state, batch)


def lower_functional(model: models.Model, devices: Sequence[jax.Device], batch_size: int) -> Lower:
    """The step with distjax, state in and out, state donated."""
    strategy = dj.MirroredStrategy(devices)
    state = handwritten.replicate(models.initial_state(model), strategy.mesh)
    batch = _batch(model, strategy, batch_size)

    def lower() -> jax.stages.Lowered:
        step = ours.make_functional_step(model, strategy)
        return dj.jit(step, donate_argnums=(0,)).lower(state, batch)

    return lower


def lower_variables(model: models.Model, devices: Sequence[jax.Device], batch_size: int) -> Lower:
    """The step with distjax, state in variables."""
    strategy = dj.MirroredStrategy(devices)
    variables = ours.make_variables(strategy, models.initial_state(model))
    batch = _batch(model, strategy, batch_size)

    def lower() -> jax.stages.Lowered:
        step = ours.make_variable_step(model, strategy, variables)
        return dj.jit(step).lower(batch)

    return lower


OURS = {"functional": lower_functional, "variables": lower_variables}


def _batch(model: models.Model, strategy: dj.MirroredStrategy, batch_size: int) -> Any:
    num_examples = batch_size * strategy.num_replicas_in_sync
    return ours.per_replica(strategy, model.batch(num_examples))
