"""The published form of an NNX loop gives under every strategy what plain NNX gives."""

import jax
import numpy as np
import pytest
from flax import nnx

import distjax as dj
from tests.drill_mark import all_drills_but
from tests.flax.image_loop import (
    axis_of,
    eval_step,
    eval_step_on_view,
    make_batches,
    make_state,
    train_step,
    train_step_on_view,
)

#: In one worker, which makes the curve of plain NNX once.
pytestmark = pytest.mark.xdist_group("flax image loop")

STRATEGIES = {
    "one_device": lambda: dj.OneDeviceStrategy(),
    "mirrored2": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual2": lambda: dj.VirtualStrategy(2),
    "sharded": lambda: dj.ShardedStrategy(
        jax.devices()[:2], partition="parameters", min_split_bytes=0
    ),
    "central": lambda: dj.CentralStorageStrategy(jax.devices()[:2]),
}
FORMS = {"modes": (train_step, eval_step), "views": (train_step_on_view, eval_step_on_view)}
TRAIN, TEST = make_batches(4), make_batches(1)


def curve(strategy, state, train, evaluate, run, batches=TRAIN):
    """Trains a step per batch, evaluates after every second; returns all metrics."""
    model, optimizer, metrics, rngs = state
    history = []
    for step, batch in enumerate(strategy.distribute_dataset(batches)):
        model.train()
        run(train, args=(model, optimizer, metrics, rngs, batch))
        if step % 2 == 0:
            continue
        history.append(metrics.compute())
        metrics.reset()
        model.eval()
        for test_batch in strategy.distribute_dataset(TEST):
            run(evaluate, args=(model, metrics, rngs, test_batch))
        history.append(metrics.compute())
        metrics.reset()
    return [float(row[name]) for row in history for name in ("loss", "accuracy")]


@pytest.fixture(scope="module")
def plain():
    """What plain NNX gives, with the steps of either form."""
    return plain_curve(make_state(), *FORMS["modes"])


def plain_curve(state, train, evaluate, batches=TRAIN):
    jitted = {step: nnx.jit(step) for step in (train, evaluate)}
    run = lambda fn, args: jitted[fn](*args)
    return curve(dj.get_strategy(), state, train, evaluate, run, batches)


CASES = [*(("modes", name) for name in STRATEGIES), ("views", "mirrored2")]


@pytest.mark.parametrize(("form", "name"), all_drills_but(CASES[1::2], CASES))
def test_the_curve_is_that_of_plain_nnx(plain, form, name):
    train, evaluate = FORMS[form]
    strategy = STRATEGIES[name]()
    state = make_state(axis_of(strategy))
    ours = curve(strategy, state, nnx.jit(train), nnx.jit(evaluate), strategy.run)
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_in_one_program_with_the_run_inside(plain):
    strategy = STRATEGIES["mirrored2"]()
    steps = {fn: dj.jit(lambda args, fn=fn: strategy.run(fn, args=args)) for fn in FORMS["modes"]}
    with strategy.scope():
        state = make_state(strategy.axis_name)
        ours = curve(strategy, state, *FORMS["modes"], lambda fn, args: steps[fn](args))
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_dropout_with_one_replica_draws_what_plain_nnx_draws():
    strategy = STRATEGIES["one_device"]()
    plain = plain_curve(make_state(rate=0.5), *FORMS["modes"], TRAIN[:2])
    ours = curve(strategy, make_state(rate=0.5), *FORMS["modes"], strategy.run, TRAIN[:2])
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


def test_each_step_is_traced_once_per_mode():
    strategy = STRATEGIES["mirrored2"]()
    traced = []

    def counted(*args):
        traced.append(None)
        train_step(*args)

    model, optimizer, metrics, rngs = make_state("replica", rate=0.5)
    for batch in strategy.distribute_dataset(TRAIN[:3]):
        model.train()
        strategy.run(counted, args=(model, optimizer, metrics, rngs, batch))
    assert len(traced) == 1
    model.set_attributes(deterministic=True)
    for batch in strategy.distribute_dataset(TRAIN[:2]):
        strategy.run(counted, args=(model, optimizer, metrics, rngs, batch))
    assert len(traced) == 2
