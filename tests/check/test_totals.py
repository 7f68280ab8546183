"""Totals and counts: what is read of a metric is their quotient."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import CheckError

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


def step_of(strategy, losses_told):
    with strategy.scope():
        metric = dj.metrics.Mean()
    return lambda x: metric.update(losses_told((x**2).sum(1)))


@pytest.mark.parametrize("told", [jnp.mean, lambda losses: losses], ids=["means", "losses"])
def test_a_metric_of_means_or_of_losses_is_right(told):
    strategy = dj.VirtualStrategy(4)
    (batch,) = strategy.distribute_dataset([X])
    dj.check(step_of(strategy, told), batch, strategy=strategy)


def test_a_metric_of_shares_is_divided_once_more():
    """The total is right, and the count is R: an integer, which no rounding excuses."""
    strategy = dj.VirtualStrategy(4)
    (batch,) = strategy.distribute_dataset([X])
    with pytest.raises(CheckError, match="variable 'mean/count' differs, by the factor 4"):
        dj.check(step_of(strategy, dj.losses.average_loss), batch, strategy=strategy)
