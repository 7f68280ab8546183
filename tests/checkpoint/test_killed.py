"""Processes killed with SIGKILL: the latest complete step is there, and training resumes."""

import random

import numpy as np
import pytest

import distjax as dj
from tests.checkpoint.killed_children import (
    Training,
    contents,
    running,
    save_again_and_again,
    train_on_two_replicas,
)
from tests.checkpoint.storages import STORAGES

#: In one worker, which makes the trainings that they go on from once.
pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("checkpoint killed")]


def test_a_kill_at_any_moment_leaves_the_latest_complete_step(tmp_path):
    """Five processes, each goes on where the one before was killed."""
    chance = random.Random(0)
    directory = tmp_path / "checkpoints"
    complete = 0
    for _ in range(5):
        with running(save_again_and_again, directory) as child:
            last = complete + chance.randrange(1, 4)
            while child.recv() != ("started", last):
                pass
            # Killed at a moment of the write or of the removal of old steps, or after them:
            # waiting for what the child says next, up to a moment drawn by lot.
            said = child.poll(chance.uniform(0, 0.06)) and child.recv()
            complete = last if said else last - 1
        checkpointer = dj.checkpoint.Checkpointer(directory)
        steps = checkpointer.all_steps()
        assert complete <= max(steps, default=0) <= last + 1
        for step in steps:
            restored = checkpointer.restore(contents(0), step)
            for key, expected in contents(step).items():
                np.testing.assert_array_equal(restored[key], expected)
        complete = max(steps, default=0)
    assert complete >= 5


@pytest.fixture(scope="module")
def uninterrupted():
    """The outcome of training on two replicas without an end before the end."""
    training = Training(STORAGES["mirrored2"]())
    for _ in training.run():
        pass
    return training.outcome()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The checkpoints of a training on two replicas that was killed."""
    directory = tmp_path_factory.mktemp("killed")
    with running(train_on_two_replicas, directory) as child:
        while child.recv() != 5:
            pass
    return directory


@pytest.mark.parametrize("name", ["mirrored2", "virtual4", "zero1", "zero3", "central"])
def test_training_resumes_on_other_replicas(name, killed, uninterrupted):
    training = Training(STORAGES[name]())
    checkpointer = dj.checkpoint.Checkpointer(killed)
    step = checkpointer.latest_step()
    assert step is not None and 4 <= step < 12
    checkpointer.restore(training.state)
    assert len(list(training.run())) == 12 - step
    loss, w = training.outcome()
    np.testing.assert_allclose(loss, uninterrupted[0], rtol=0, atol=1e-4)
    np.testing.assert_allclose(w, uninterrupted[1], rtol=0, atol=1e-4)
