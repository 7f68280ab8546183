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


@pytest.mark.parametrize("is_right", [True, False])
def test_components_that_stay_apart_are_found_by_a_second_step(is_right):
    """The mean of the replicas' centers is right after one step; what each subtracts is not."""
    strategy = dj.VirtualStrategy(4)
    with strategy.scope():
        center = dj.Variable(
            jnp.zeros(3),
            name="center",
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.MEAN,
        )
    (batch,) = strategy.distribute_dataset([X])

    def step(x):
        ctx, mean = dj.get_replica_context(), jnp.mean(x, 0)
        loss = ctx.all_reduce("mean", jnp.mean(jnp.tanh(x - center.value)))
        center.assign(ctx.all_reduce("mean", mean) if is_right else mean)
        return loss

    before = center.local_results()
    if is_right:
        dj.check(step, batch, strategy=strategy)
    else:
        with pytest.raises(CheckError, match="the result differs"):
            dj.check(step, batch, strategy=strategy)
    np.testing.assert_array_equal(center.local_results(), before)
