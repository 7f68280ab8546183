"""Trainings of the examples that are saved, and go on in other processes: to the bit.

Each form of `example_runs` is built of its example's own parts. What is compared are the losses
after the save, and the bits of the whole state at the end.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import distjax as dj
from tests.drills.example_runs import LANGUAGE_MODEL, STRATEGIES, modules_of
from tests.processes.warm import ROOT

#: Before the save, and after it.
STEPS_BEFORE, STEPS_AFTER = 5, 10
_BATCH, _SEED = 64, 0


class Training(NamedTuple):
    """What is trained.

    Attributes:
      state: what is saved, without the iterator.
      set_state: takes what came back, where arrays are saved and no objects.
      step: one step on a batch; its loss.
      batches: the data.
    """

    state: Callable[[], Any]
    set_state: Callable[[Any], None]
    step: Callable[[Any], Any]
    batches: Any


class Ending(NamedTuple):
    """The losses after the save, and a checksum of the state on this process."""

    losses: list[str]
    checksum: int


def train_and_save(script: str, strategy: str, directory: str) -> Ending:
    """Saves in the middle, and goes on."""
    return _train(script, strategy, directory, is_resumed=False)


def resume(script: str, strategy: str, directory: str) -> Ending:
    """Goes on where the save was, in new objects."""
    return _train(script, strategy, directory, is_resumed=True)


def _train(script: str, name: str, directory: str, *, is_resumed: bool) -> Ending:
    make = _MAKERS[script]
    strategy = STRATEGIES[name]()
    with modules_of(ROOT / "examples" / script), strategy.scope():
        training = make(strategy, pathlib.Path(script).stem)
        batches = iter(strategy.distribute_dataset(training.batches))
        with dj.checkpoint.Checkpointer(directory) as checkpointer:
            whole = {"state": training.state(), "data": batches}
            if is_resumed:
                training.set_state(checkpointer.restore(whole)["state"])
            else:
                for _ in range(STEPS_BEFORE):
                    training.step(next(batches))
                checkpointer.save(STEPS_BEFORE, {"state": training.state(), "data": batches})
        losses = [float(training.step(batch)).hex() for batch in batches]
        assert len(losses) == STEPS_AFTER
        return Ending(losses, _checksum(training.state()))


def _checksum(state: Any) -> int:
    """Of all that this process holds of a state, in order."""
    from flax import nnx

    is_leaf = lambda x: isinstance(x, (nnx.Module, nnx.Optimizer, dj.Variable))
    found = 0
    for leaf in jax.tree.leaves(state, is_leaf=is_leaf):
        value = leaf.value if isinstance(leaf, dj.Variable) else leaf
        value = nnx.state(leaf) if isinstance(leaf, (nnx.Module, nnx.Optimizer)) else value
        for array in jax.tree.leaves(value):
            if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
                array = jax.random.key_data(array)
            for shard in array.addressable_shards:
                found = zlib.crc32(np.asarray(shard.data).tobytes(), found)
    return found


# -- the forms --------------------------------------------------------------------


def _digits_batches(data: Any, split: Any) -> list[dict[str, np.ndarray]]:
    batches = data.train_batches(split, _BATCH, _SEED)
    count = STEPS_BEFORE + STEPS_AFTER
    return [next(batches)._asdict() for _ in range(count)]


def _make_variables(strategy: dj.Strategy, script: str) -> Training:
    data, model, train = map(importlib.import_module, ("data", "model", script))
    split, _ = data.load()
    network = model.ConvNet(axis_name=strategy.axis_name)
    initial = model.initialize(network, split.images, _SEED)
    trainer = train.Trainer(network, model.make_optimizer(100), initial)

    @dj.jit
    def step(batch):
        args = batch["images"], batch["labels"]
        return strategy.reduce("mean", strategy.run(trainer.train_step, args=args))

    state = {
        "params": trainer.params,
        "stats": trainer.batch_stats,
        "adam": trainer.optimizer_state,
    }
    return Training(lambda: state, lambda _: None, step, _digits_batches(data, split))


def _make_modules(strategy: dj.Strategy, script: str) -> Training:
    from flax import nnx

    data, model, modules = map(importlib.import_module, ("data", "model", script))
    split, _ = data.load()
    shape, axis_name = split.images.shape[1:], strategy.axis_name
    network = dj.flax.create(lambda: modules.ConvNet(shape, axis_name, rngs=nnx.Rngs(_SEED)))
    optimizer = nnx.Optimizer(network, model.make_optimizer(100), wrt=nnx.Param)
    network.train()

    def step(batch):
        args = network, optimizer, batch["images"], batch["labels"]
        return strategy.run(modules.train_step, args=args)

    state = {"network": network, "optimizer": optimizer}
    return Training(lambda: state, lambda _: None, step, _digits_batches(data, split))


def _make_functional(strategy: dj.Strategy, script: str) -> Training:
    data, model, functional = map(importlib.import_module, ("data", "model", script))
    split, _ = data.load()
    network = model.ConvNet(axis_name=strategy.axis_name)
    args = network, model.make_optimizer(100), split.images[:1], _SEED
    held = {"state": strategy.run(functional.make_state, args=args)}

    @dj.jit(donate_argnums=0)
    def next_state(state, batch):
        args = state, batch["images"], batch["labels"]
        return strategy.run(functional.train_step, args=args)

    def step(batch):
        held["state"], loss = next_state(held["state"], batch)
        return loss

    def set_state(state):
        held["state"] = state

    return Training(lambda: held["state"], set_state, step, _digits_batches(data, split))


def _make_language_model(strategy: dj.Strategy, script: str) -> Training:
    text, train = map(importlib.import_module, ("text", script))
    steps = STEPS_BEFORE + STEPS_AFTER
    chosen = argparse.Namespace(
        steps=steps, seed=_SEED, context=32, width=32, layers=2, dropout=0.1, micro_batches=1
    )
    trainer = train.Trainer(chosen)

    def step(batch):
        strategy.run(trainer.train_step, args=(batch,))
        return trainer.loss.compute()  # the mean of all steps

    tokens, _ = text.load()
    windows = text.Windows(tokens, chosen.context, 32, steps, _SEED)
    state = {"model": trainer.model, "optimizer": trainer.optimizer, "loss": trainer.loss}
    return Training(lambda: state, lambda _: None, step, windows)


_MAKERS: dict[str, Callable[[dj.Strategy, str], Training]] = {
    "digits/train.py": _make_variables,
    "digits/modules.py": _make_modules,
    "digits/functional.py": _make_functional,
    LANGUAGE_MODEL: _make_language_model,
}
