"""Local SGD: a strategy made of parts, against the same arithmetic in numpy."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.testing.hlo import count_collectives
from tests.drill_mark import all_drills_but
from tests.examples.scripts import EXAMPLES, last_line

TARGETS = np.array([1.0, 3.0], np.float32)  # each replica pulls w to its own
LEARNING_RATE = 0.25


@pytest.fixture
def strategy():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / "local_sgd"))
        from local_sgd import LocalSGDStrategy
    del sys.modules["local_sgd"]
    return LocalSGDStrategy(local_steps=3, devices=jax.devices()[:2])


def pull(w: dj.Variable):
    def step(target):
        w.assign_sub(LEARNING_RATE * (w.value - target))

    return step


def test_replicas_train_apart_and_meet(strategy):
    with strategy.scope():
        w = dj.Variable(0.0, name="w")
    targets = strategy.distribute_values_from_function(
        lambda context: TARGETS[context.replica_id_in_sync_group]
    )
    expected = np.zeros(2, np.float32)
    for _ in range(2):
        for _ in range(strategy.local_steps):
            strategy.run(pull(w), args=(targets,))
            expected -= LEARNING_RATE * (expected - TARGETS)
        np.testing.assert_allclose([float(x) for x in w.local_results()], expected, rtol=1e-6)
        dj.jit(strategy.average)([w])
        expected[:] = expected.mean()
        np.testing.assert_allclose([float(x) for x in w.local_results()], expected, rtol=1e-6)


def test_a_local_step_communicates_nothing(strategy):
    with strategy.scope():
        w = dj.Variable(jnp.zeros(4), name="w")
    step = dj.jit(lambda x: strategy.run(pull(w), args=(x,)))
    targets = strategy.distribute_values_from_function(lambda context: jnp.ones(4))
    text = step.lower(targets).compile().as_text()
    assert not count_collectives(text)


def test_only_trained_variables_are_local(strategy):
    with strategy.scope():
        count = dj.Variable(0, name="count", trainable=False)
        w = dj.Variable(0.0, name="w")
    assert dj.locality(count).kind == "mirrored"
    assert dj.locality(w).kind == "per_replica" and w.trainable


@pytest.mark.parametrize("local_steps", all_drills_but([4], [1, 4]))
def test_the_script_averages_so_often(local_steps):
    line = last_line("local_sgd/train.py", "--steps", "22", "--local-steps", str(local_steps))
    steps, averages, loss, accuracy = line.split()
    assert (int(steps), int(averages)) == (local_steps, -(-22 // local_steps))
    assert 0 < float(loss) < np.log(10) and 0.1 < float(accuracy.rstrip("%")) / 100 <= 1
