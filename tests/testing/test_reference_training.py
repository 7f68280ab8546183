"""Optimizers, metrics and checkpoints work in the reference interpreter, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj

rng = np.random.default_rng(0)
BATCHES = rng.normal(size=(6, 4, 3)).astype(np.float32)


def loss_of(w, x):
    return jnp.mean((x @ w - 1) ** 2)


def losses_and_weights(strategy, optimizer):
    """The variables loop of the README."""
    with strategy.scope():
        v = dj.Variable(jnp.zeros(3), name="v")
    optimizer.init([v])

    def train_step(x):
        loss, grads = jax.value_and_grad(loss_of)(v.value, x)
        optimizer.apply_gradients([(grads, v)])
        return loss

    losses = [strategy.run(train_step, args=(x,)) for x in strategy.distribute_dataset(BATCHES)]
    return np.array([strategy.local_results(x) for x in losses]), np.asarray(v.value)


OPTIMIZERS = {
    "sgd": lambda: dj.optim.Optimizer(optax.sgd(0.1), reduce_op="mean"),
    "adam": lambda: dj.optim.Optimizer(optax.adam(0.1), "mean"),
    "clipped": lambda: dj.optim.Optimizer(
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(optax.linear_schedule(1, 0, 9))),
        reduce_op="mean",
    ),
    "accumulating": lambda: dj.optim.Optimizer(optax.adam(0.1), "mean", accumulate_steps=2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_training_loop_has_the_numbers_of_a_compiled_one(make):
    here = losses_and_weights(dj.testing.ReferenceStrategy(2), make())
    there = losses_and_weights(dj.VirtualStrategy(2), make())
    for x, y in zip(here, there, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_an_optimizer_is_called_across_replicas():
    def weights(strategy):
        with strategy.scope():
            v = dj.Variable(jnp.ones(3))
        optimizer = dj.optim.Optimizer(optax.adam(0.1))
        optimizer.init({"v": v})
        grads = strategy.run(lambda x: jax.grad(loss_of)(v.value, x), args=(jnp.ones((2, 3)),))
        optimizer.apply_gradients([(strategy.extended.broadcast_to({"v": grads}), {"v": v})])
        return v.value

    here, there = weights(dj.testing.ReferenceStrategy(2)), weights(dj.VirtualStrategy(2))
    np.testing.assert_allclose(here, there, rtol=1e-6)


def test_metrics_count_as_in_a_compiled_strategy():
    def results(strategy):
        with strategy.scope():
            mean, hits = dj.metrics.Mean(), dj.metrics.Accuracy()

        def step(x):
            mean.update(x)
            hits.update(x, jnp.argmin(x, -1))
            return mean.result()

        seen = []
        for x in strategy.distribute_dataset(BATCHES):
            seen.append(strategy.run(step, args=(x,)))
            mean.update(x)
            mean.update(np.ones(3, np.float32))  # counts once
            seen += [mean.result(), hits.result()]
        mean.reset()
        return [*map(float, seen), float(mean.result())]

    here, there = results(dj.testing.ReferenceStrategy(2)), results(dj.VirtualStrategy(2))
    np.testing.assert_allclose(here, there, rtol=1e-5)


def test_checkpoints_go_to_a_compiled_strategy_and_back(tmp_path):
    def state(strategy):
        sync, total = dj.VariableSynchronization.ON_READ, dj.VariableAggregation.SUM
        with strategy.scope():
            v = dj.Variable(jnp.zeros(3), name="v")
            count = dj.Variable(0, synchronization=sync, aggregation=total)
            mean = dj.metrics.Mean()
        optimizer = dj.optim.Optimizer(optax.adam(0.1))
        optimizer.init([v])
        (x,) = strategy.distribute_dataset(BATCHES[:1])
        return {"v": v, "count": count, "optimizer": optimizer, "mean": mean, "x": x}

    def numbers(tree):
        slots = jax.tree.leaves(tree["optimizer"].state)
        values = [v.value for v in (tree["v"], tree["count"], *slots)]
        return [np.asarray(x) for x in (*values, tree["x"].stacked, tree["mean"].result())]

    saved = state(dj.testing.ReferenceStrategy(2))
    saved["v"].assign(jnp.arange(3.0))
    saved["count"].assign(7)
    saved["mean"].update(np.arange(3.0, dtype=np.float32))
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved)
        there = checkpointer.restore(state(dj.VirtualStrategy(2)))
        checkpointer.save(2, there)
        back = checkpointer.restore(state(dj.testing.ReferenceStrategy(2)))
    for x, y, z in zip(numbers(saved), numbers(there), numbers(back), strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z)
    assert [int(c) for c in back["count"].local_results()] == [4, 3]
    assert back["v"] is not saved["v"]


def test_a_variable_without_one_value_is_refused_by_a_checkpoint(tmp_path):
    with dj.testing.ReferenceStrategy(2).scope():
        v = dj.Variable(0.0, synchronization=dj.VariableSynchronization.ON_READ)
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(dj.errors.AggregationError, match="save of variable"):
            checkpointer.save(1, {"v": v})
