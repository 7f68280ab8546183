"""Metrics where transfers must be explicit."""

import jax
import jax.numpy as jnp
import pytest

import distjax as dj

MASK = jnp.array([True, True, True, False])


def mean_of(strategy):
    """Returns a metric, and what adds [1, 2, 3] to it, whose mean is 2."""
    with strategy.scope():
        mean = dj.metrics.Mean()
    values = jnp.arange(1.0, 5.0)
    return mean, lambda: strategy.run(lambda: mean.update(values, mask=MASK)), 2


def sum_of(strategy):
    """Returns a metric, and what adds [1, 2, 3] to it on each of two replicas."""
    with strategy.scope():
        total = dj.metrics.Sum()
    values = jnp.arange(1.0, 5.0)
    return total, lambda: strategy.run(lambda: total.update(values, mask=MASK)), 12


def accuracy_of(strategy):
    """Returns a metric, and what adds three hits of three to it."""
    with strategy.scope():
        accuracy = dj.metrics.Accuracy()
    logits, labels = jnp.eye(4), jnp.array([0, 1, 2, 0])
    return accuracy, lambda: strategy.run(lambda: accuracy.update(logits, labels, mask=MASK)), 1


METRICS = pytest.mark.parametrize("make", [mean_of, accuracy_of, sum_of])


@METRICS
def test_a_result_without_implicit_transfers(pair, make):
    metric, update, expected = make(pair)
    update()
    with jax.transfer_guard("disallow"):
        result = metric.result()
    assert float(result) == expected


@METRICS
def test_a_reset_without_implicit_transfers(pair, make):
    metric, update, _ = make(pair)
    update()
    with jax.transfer_guard("disallow"):
        metric.reset()
    assert float(metric.result()) == 0
