"""Weighted gradients, a partial window at the end, and a moving average of the variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax.testing.hlo import count_collectives
from tests.interrupts import in_packages, interrupted

SHAPE = (16, 4)


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.normal(size=24).astype(np.float32), rng.integers(0, 5, 24).astype(np.float32)


def rows(array, num_replicas):
    return array.reshape(num_replicas, -1)


def test_the_mean_over_calls_and_replicas_is_weighted(strategy, how):
    require_weighted_mean(strategy, how, steps=2)


def test_the_mean_over_replicas_is_weighted(pair, how):
    require_weighted_mean(pair, how, steps=1)


def require_weighted_mean(strategy, how, steps):
    """Asserts it of updates at each `steps`-th call, also after the last ones."""
    with strategy.scope():
        w = dj.Variable(jnp.zeros(SHAPE), name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), "mean", accumulate_steps=steps, weighted=True)
    optimizer.init([w])
    count = strategy.num_replicas_in_sync

    def replica_step(x, weights):
        gradient = jnp.full(SHAPE, x.mean())
        optimizer.apply_gradients([(gradient, w)], weight=weights[0])

    step = how(lambda x, weights: strategy.run(replica_step, args=(x, weights)))
    expected, window = 0.0, []
    for i, batch in enumerate(batches(5)):
        for x, weights in strategy.distribute_dataset([batch]):
            step(x, weights)
        window.append([rows(a, count) for a in batch])
        if (i + 1) % steps == 0:
            expected -= weighted_mean(window)
            window = []
        np.testing.assert_allclose(w.value, np.full(SHAPE, expected), rtol=1e-5, atol=1e-6)
    optimizer.flush()
    expected -= weighted_mean(window) if window else 0.0
    np.testing.assert_allclose(w.value, np.full(SHAPE, expected), rtol=1e-5, atol=1e-6)
    optimizer.flush()  # nothing has been accumulated since
    np.testing.assert_allclose(w.value, np.full(SHAPE, expected), rtol=1e-5, atol=1e-6)


def weighted_mean(window):
    weights = np.array([w[:, 0] for _, w in window])
    return (np.array([x.mean(1) for x, _ in window]) * weights).sum() / weights.sum()


def test_in_cross_replica_context(pair):
    with pair.scope():
        w = dj.Variable(0.0, name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), "mean", weighted=True)
    optimizer.init([w])
    gradient, weight = pair.per_replica((np.float32([1, 4]), np.float32([3, 1])))
    optimizer.apply_gradients([(gradient, w)], weight=weight)
    assert float(w.value) == -7 / 4


def test_gradients_without_any_weight_change_nothing(pair):
    with pair.scope():
        w = dj.Variable(1.0, name="w")
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), "mean", weighted=True)
    optimizer.init([w])
    pair.run(lambda: optimizer.apply_gradients([(jnp.float32(0), w)], weight=0.0))
    assert float(w.value) == 1.0


def test_flush_in_a_step_and_without_accumulation(pair, how):
    with pair.scope():
        v, w = dj.Variable(0.0, name="v"), dj.Variable(0.0, name="w")
    plain = dj.optim.Optimizer(optax.sgd(1.0), "mean")
    plain.init([v])
    plain.flush()
    optimizer = dj.optim.Optimizer(optax.sgd(1.0), "mean", accumulate_steps=3)
    optimizer.init([w])
    how(lambda: pair.run(lambda: optimizer.apply_gradients([(jnp.float32(2), w)])))()
    how(lambda: pair.run(optimizer.flush))()
    assert (float(v.value), float(w.value)) == (0.0, -2.0)


def test_a_weight_too_many_or_missing(pair):
    with pair.scope():
        w = dj.Variable(0.0, name="w")

    def refused(optimizer, **weight):
        optimizer.init([w])
        pairs = [(jnp.float32(0), w)]
        with pytest.raises(ValueError, match="needs a weight of a weighted optimizer, and of no"):
            pair.run(lambda: optimizer.apply_gradients(pairs, **weight))

    refused(dj.optim.Optimizer(optax.sgd(1.0), "mean", weighted=True))
    refused(dj.optim.Optimizer(optax.sgd(1.0), "mean"), weight=1.0)
    with pytest.raises(ValueError, match="weighted=True needs reduce_op='mean'"):
        dj.optim.Optimizer(optax.sgd(1.0), weighted=True)
    with pytest.raises(dj.errors.ContextError, match="flush needs an optimizer that has its state"):
        dj.optim.Optimizer(optax.sgd(1.0)).flush()


# -- the moving average -------------------------------------------------------


def test_the_average_follows_and_swaps(strategy, how):
    with strategy.scope():
        w = {"w": dj.Variable(jnp.zeros(SHAPE), name="w")}
    ema = dj.optim.ExponentialMovingAverage(0.9)
    ema.init(w)
    assert w.keys() == ema.averages.keys()

    step = how(lambda: strategy.run(ema.update))
    average = 0.0
    for value in (1.0, 2.0, 3.0, 4.0):
        w["w"].assign(jnp.full(SHAPE, value))
        step()
        average = 0.9 * average + 0.1 * value
    with ema.swapped():
        np.testing.assert_allclose(w["w"].value, np.full(SHAPE, average), rtol=1e-6)
    np.testing.assert_allclose(w["w"].value, np.full(SHAPE, value))
    np.testing.assert_allclose(ema.averages["w"].value, np.full(SHAPE, average), rtol=1e-6)


def test_a_split_variable_is_not_gathered():
    strategy = dj.ShardedStrategy(partition="parameters", min_split_bytes=0)
    with strategy.scope():
        w = dj.Variable(jnp.zeros(SHAPE), name="w")
    ema = dj.optim.ExponentialMovingAverage(0.9)
    ema.init([w])
    text = strategy.jit(ema.update).lower().compile().as_text()
    assert not count_collectives(text)


def test_an_error_while_swapped_swaps_back(pair):
    with pair.scope():
        w = dj.Variable(1.0, name="w")
    ema = dj.optim.ExponentialMovingAverage(0.5)
    ema.init([w])
    w.assign(3.0)
    with pytest.raises(KeyError), ema.swapped():
        assert float(w.value) == 1.0
        raise KeyError
    assert (float(w.value), float(ema.averages[0].value)) == (3.0, 1.0)


def test_an_interrupt_while_it_swaps_swaps_back(pair):
    """Ctrl-C waits for a swap that is launched, and comes before the block or after it."""
    with pair.scope():
        w = dj.Variable(1.0, name="w")
    ema = dj.optim.ExponentialMovingAverage(0.5)
    ema.init([w])
    w.assign(3.0)

    def evaluate():
        with ema.swapped():
            assert float(w.value) == 1.0

    evaluate()
    for at in range(1, 400):
        outcome = interrupted(evaluate, at, in_packages("distjax._src.program"))
        assert (float(w.value), float(ema.averages[0].value)) == (3.0, 1.0), outcome.line
        if outcome.line is None:
            break
    assert 20 < at < 399


def test_what_a_moving_average_refuses(pair):
    for decay in (2.0, "0.9", jnp.float32(0.5)):
        with pytest.raises(ValueError, match="needs a decay between 0 and 1"):
            dj.optim.ExponentialMovingAverage(decay)
    ema = dj.optim.ExponentialMovingAverage(0.5)
    for use in (ema.update, ema.kept_variables, ema.swapped().__enter__):
        with pytest.raises(dj.errors.ContextError, match="needs a moving average that has its var"):
            use()
    with pair.scope():
        narrow, w = dj.Variable(jnp.bfloat16(0)), dj.Variable(0.0)
    with pytest.raises(TypeError, match="needs variables of float32 or wider"):
        ema.init([narrow])
    with pytest.raises(TypeError, match=r"ExponentialMovingAverage\.init needs distjax\.Variables"):
        ema.init([jnp.zeros(2)])
    ema.init([w])

    def step():
        with ema.swapped():
            pass

    with pytest.raises(dj.errors.ContextError, match="swapped needs to be outside a step"):
        pair.run(step)
    assert jax.tree.leaves(ema.averages)[0].name.endswith("/average")
