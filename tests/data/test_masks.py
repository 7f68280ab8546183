"""The law of decision 16: weighted by the mask, results equal the unpadded ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distjax as dj
from tests.conftest import SAMPLE, STRATEGIES

PAD = dj.InputOptions("pad", prefetch=0)
NAMES = [*SAMPLE, "servers", "groups"]


@functools.cache
def made(name):
    return STRATEGIES[name]()


def numbers(sizes, seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=(n, 3)).astype(np.float32) for n in sizes]


def losses(x):
    return jnp.log(1 + jnp.sum(x * x, axis=1))


@pytest.mark.filterwarnings("ignore::distjax.errors.RecompilationWarning")
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=5, deadline=None)
@given(first=st.integers(1, 9), sizes=st.lists(st.integers(0, 9), max_size=3), seed=st.integers(0))
def test_law_reduce_with_the_mask(name, first, sizes, seed):
    strategy = made(name)
    batches = numbers([first, *(min(n, first) for n in sizes)], seed % 2**32)
    for batch, unpadded in zip(strategy.distribute_dataset(batches, PAD), batches, strict=True):
        per_example = strategy.run(losses, args=(batch.data,))
        expected = np.log(1 + np.sum(unpadded**2, axis=1))
        total = strategy.reduce("sum", per_example, axis=0, mask=batch.mask)
        np.testing.assert_allclose(total, expected.sum(), rtol=1e-5, atol=1e-6)
        if len(unpadded):
            mean = strategy.reduce("mean", per_example, axis=0, mask=batch.mask)
            np.testing.assert_allclose(mean, expected.mean(), rtol=1e-5, atol=1e-6)
        rows = strategy.reduce("sum", batch.data, axis=0, mask=batch.mask)
        np.testing.assert_allclose(rows, unpadded.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["one_device", "mirrored2", "mirrored8", "virtual3"])
def test_metrics_over_an_epoch(name):
    """`dj.metrics`, and the same by hand: two sync-on-read sums, weighted by the mask."""
    strategy = made(name)
    batches = numbers([7, 7, 5], 1)
    modes = {
        "synchronization": dj.VariableSynchronization.ON_READ,
        "aggregation": dj.VariableAggregation.SUM,
    }
    with strategy.scope():
        mean = dj.metrics.Mean()
        total, count = dj.Variable(0.0, **modes), dj.Variable(0.0, **modes)

    def update(batch):
        mean.update(losses(batch.data), mask=batch.mask)
        total.assign_add(jnp.sum(jnp.where(batch.mask, losses(batch.data), 0)))
        count.assign_add(jnp.sum(batch.mask.astype(jnp.float32)))

    for batch in strategy.distribute_dataset(batches, PAD):
        strategy.run(update, args=(batch,))
    expected = np.log(1 + np.sum(np.concatenate(batches) ** 2, axis=1)).mean()
    assert float(count.value) == 19
    np.testing.assert_allclose(total.value / count.value, expected, rtol=1e-5)
    np.testing.assert_allclose(mean.result(), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["mirrored2", "virtual3"])
def test_gradients_of_padded_batches(name):
    """Examples that fill a batch up are real ones: 0 would make this derivative NaN."""
    strategy = made(name)
    data = [np.linspace(1, 2, n, dtype=np.float32) for n in (6, 4)]

    def step(w, batch):
        def loss(w):
            return jnp.sum(jnp.where(batch.mask, jnp.log(w * batch.data), 0))

        return dj.get_replica_context().all_reduce("sum", jax.grad(loss)(w))

    for batch, unpadded in zip(strategy.distribute_dataset(data, PAD), data, strict=True):
        gradient = strategy.run(step, args=(jnp.float32(2), batch))
        np.testing.assert_allclose(gradient, len(unpadded) / 2, rtol=1e-6)


@pytest.mark.parametrize("name", ["mirrored2", "virtual3"])
def test_elements_of_a_function(name):
    strategy = made(name)
    made_elements = numbers([4] * 4 + [2], 3)
    found = [
        strategy.reduce("sum", batch.data, axis=0, mask=batch.mask)
        for batch in strategy.distribute_datasets_from_function(lambda ctx: made_elements, PAD)
    ]
    np.testing.assert_allclose(sum(found), np.concatenate(made_elements).sum(0), rtol=1e-5)
