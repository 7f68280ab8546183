"""`dj.check` has nothing to say about the steps of the examples: each of them is right."""

import argparse
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import distjax as dj
from tests.examples.scripts import EXAMPLES

IMAGES = np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32)
LABELS = np.arange(8) % 3


@pytest.fixture
def load(monkeypatch):
    """``load(folder, name)``: a module of an example; two folders have modules of one name."""

    def load_module(folder: str, name: str):
        monkeypatch.syspath_prepend(str(EXAMPLES / folder))
        return importlib.import_module(name)

    before = dict(sys.modules)
    forget_examples()
    yield load_module
    forget_examples()
    sys.modules.update(before)


def forget_examples():
    for name, module in [*sys.modules.items()]:
        if Path(getattr(module, "__file__", None) or "").is_relative_to(EXAMPLES):
            del sys.modules[name]


def batch_of(strategy, *arrays):
    return next(iter(strategy.distribute_dataset([arrays])))


@pytest.mark.drill
def test_digits_in_variables(load, mirrored):
    model, train = load("digits", "model"), load("digits", "train")
    batch = batch_of(mirrored, IMAGES, LABELS)
    with mirrored.scope():
        network = model.ConvNet(axis_name=mirrored.axis_name)
        trainer = train.Trainer(network, optax.adam(0.1), model.initialize(network, IMAGES[:1], 0))
    assert dj.check(trainer.test_step, *batch, strategy=mirrored) is None
    train_step = lambda *batch: mirrored.reduce("mean", mirrored.run(trainer.train_step, batch))
    assert dj.check(train_step, *batch) is None


def test_digits_as_functions(load, mirrored):
    model, functional = load("digits", "model"), load("digits", "functional")
    batch = batch_of(mirrored, IMAGES, LABELS)
    network = model.ConvNet(axis_name=mirrored.axis_name)
    state = functional.make_state(network, optax.adam(0.1), IMAGES[:1], 0)
    assert dj.check(functional.train_step, state, *batch, strategy=mirrored) is None
    assert dj.check(functional.test_step, state, *batch, strategy=mirrored) is None


def test_digits_in_modules(load, mirrored):
    modules = load("digits", "modules")
    batch = batch_of(mirrored, IMAGES, LABELS)
    with mirrored.scope():
        network = dj.flax.create(
            lambda: modules.ConvNet((8, 8, 1), mirrored.axis_name, rngs=nnx.Rngs(0))
        )
        optimizer = nnx.Optimizer(network, optax.adam(0.1), wrt=nnx.Param)
        accuracy = dj.metrics.Accuracy()
    assert dj.check(modules.train_step, network, optimizer, *batch, strategy=mirrored) is None
    assert dj.check(modules.test_step, network, accuracy, *batch, strategy=mirrored) is None


@pytest.mark.drill
def test_digits_in_equinox(load, mirrored):
    eqx = pytest.importorskip("equinox")
    form = load("digits", "equinox_form")
    key, optimizer = jax.random.key(0), optax.adam(0.1)
    network, state = eqx.nn.make_with_state(form.ConvNet)(mirrored.axis_name, key)
    optimizer_state = optimizer.init(eqx.filter(network, eqx.is_array))
    batch = batch_of(mirrored, IMAGES, LABELS)
    args = (network, state, optimizer_state, optimizer, *batch, key)
    assert dj.check(form.train_step, *args, strategy=mirrored) is None
    assert dj.check(mirrored.jit(form.train_step), *args) is None
    assert dj.check(form.test_step, network, state, *batch, strategy=mirrored) is None


@pytest.mark.drill
def test_cartpole(load, mirrored):
    with mirrored.scope():
        trainer = load("cartpole", "train").Trainer(mirrored, seed=0)
    assert (
        dj.check(
            trainer.replica_step, *batch_of(mirrored, np.zeros(2, np.uint32)), strategy=mirrored
        )
        is None
    )


@pytest.mark.drill
def test_gan(load, mirrored):
    with mirrored.scope():
        game = load("gan", "train").Game(64, seed=0)
    [images] = batch_of(mirrored, IMAGES.reshape(8, 64))
    assert dj.check(game.step, images, jax.random.key(0), strategy=mirrored) is None


@pytest.mark.drill
def test_local_sgd(load):
    train = load("local_sgd", "train")
    strategy = train.LocalSGDStrategy(4, jax.devices()[:2])
    with strategy.scope():
        classifier = train.Classifier(seed=0)

    def local_step(*batch):
        with dj.expect("replicas train apart and are averaged every few steps"):
            losses = strategy.run(classifier.train_step, args=batch)
        return strategy.reduce("mean", losses)

    batch = batch_of(strategy, IMAGES.reshape(8, 64), LABELS)
    assert dj.check(local_step, *batch) is None
    assert dj.check(lambda: strategy.average(classifier.variables)) is None


@pytest.mark.drill
def test_language_model(load, mirrored):
    """A captured metric of Flax differs on each replica until the step ends: its rule sums it."""
    chosen = argparse.Namespace(
        steps=20, seed=0, context=8, width=8, layers=1, dropout=0.1, micro_batches=1
    )
    with mirrored.scope():
        trainer = load("language_model", "train").Trainer(chosen)
    [windows] = batch_of(mirrored, np.random.default_rng(0).integers(0, 256, (8, 9), np.int32))
    assert dj.check(trainer.train_step, windows, strategy=mirrored) is None
    assert dj.check(trainer.test_step, windows, strategy=mirrored) is None


def test_state_of_objects_is_settled_by_rules_and_results_are_not(mirrored):
    model = nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(1)))
    metrics = nnx.MultiMetric(average=nnx.metrics.Average(), welford=nnx.metrics.Welford())

    def step(model, metrics, w, x):
        metrics.update(values=model(x) @ w)
        return w + 0.1 * x.mean(axis=0) if forgets else w

    [x] = batch_of(mirrored, np.ones((8, 3), np.float32))
    forgets = False
    assert dj.check(step, model, metrics, jnp.ones(3), x, strategy=mirrored) is None
    forgets = True
    with pytest.raises(dj.errors.CheckError) as caught:
        dj.check(step, model, metrics, jnp.ones(3), x, strategy=mirrored)
    [finding] = caught.value.findings
    assert "as its result an update of w that differs" in finding.text
