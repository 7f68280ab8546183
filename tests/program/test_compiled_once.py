"""A step is compiled once, also where its state was made by JAX on its default device."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj

#: Compilations of three calls; the default strategy compiles none, but runs the step as it is.
ONCE = [1, 0, 0], [0, 0, 0]


@pytest.fixture
def count_compilations(caplog):
    """``count_compilations(call)``: how many programs named `train` XLA compiles meanwhile."""

    def count(call):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
            call()
        return sum("Finished XLA compilation of jit(train" in m for m in caplog.messages)

    return count


def batches(strategy):
    return list(strategy.distribute_dataset([np.ones((24, 3), np.float32)] * 3))


def test_with_variables(strategy, count_compilations):
    with strategy.scope():
        w = dj.Variable(jnp.zeros(3), name="w", aggregation=dj.VariableAggregation.MEAN)

    def train(x):
        w.assign_add(x.mean(0))

    counts = [
        count_compilations(lambda x=x: strategy.run(train, args=(x,))) for x in batches(strategy)
    ]
    assert counts in ONCE
    assert np.asarray(w.value).tolist() == [3, 3, 3]


@pytest.mark.parametrize("place", [False, True], ids=["at its first run", "placed"])
def test_with_modules(strategy, count_compilations, place):
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    if place:
        with strategy.scope():
            dj.flax.place(model)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def train(model, optimizer, x):
        grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, dj.get_replica_context().all_reduce("mean", grads))

    counts = [
        count_compilations(lambda x=x: strategy.run(train, args=(model, optimizer, x)))
        for x in batches(strategy)
    ]
    assert counts in ONCE


def test_with_placed_state(count_compilations):
    strategy, tx = dj.MirroredStrategy(jax.devices()[:4]), optax.adam(0.1)
    w = strategy.extended.broadcast_to(jnp.zeros(3))
    state = strategy.extended.broadcast_to(tx.init(w))

    def train(w, state, x):
        grads = dj.get_replica_context().all_reduce("mean", x.mean(0) + w)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    def step(x):
        nonlocal w, state
        w, state = strategy.run(train, args=(w, state, x))

    assert [count_compilations(lambda x=x: step(x)) for x in batches(strategy)] == [1, 0, 0]
