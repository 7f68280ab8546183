"""A restore that is interrupted changes all or nothing, and the interrupt stays one."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.interrupts import campaign, in_packages

#: Where orbax, in the thread that restores, turns whatever is raised into an Exception.
READING = in_packages("orbax.checkpoint._src.serialization")


@pytest.fixture
def trained(mirrored, checkpointer):
    """Variables and an iterator that are to be restored: ``(tree, values, reset)``.

    A step is saved with 1 in the variables and 3 elements taken; `reset` goes back to 0.
    """
    with mirrored.scope():
        tree = {f"v{i}": dj.Variable(jnp.zeros(4), name=f"v{i}") for i in range(2)}
    options = dj.InputOptions(prefetch=0)
    iterator = iter(mirrored.distribute_dataset([np.zeros(2)] * 4, options))
    begin = iterator.get_state()

    def values():
        taken = iterator.get_state()["delivered"]
        return [taken, *(np.asarray(v.value)[0].item() for v in tree.values())]

    def reset():
        iterator.set_state(begin)
        for v in tree.values():
            v.assign(jnp.zeros(4))

    for v in tree.values():
        v.assign(jnp.ones(4))
    for _ in range(3):
        next(iterator)
    state = {**tree, "iterator": iterator}
    checkpointer.save(1, state)
    checkpointer.wait()
    assert values() == [3, 1, 1]
    return state, values, reset


def test_each_line_of_a_restore_leaves_all_old_or_all_restored(trained, checkpointer):
    tree, values, reset = trained

    def make():
        reset()
        return None, lambda: checkpointer.restore(tree)

    def check(_, outcome):
        assert isinstance(outcome.error, KeyboardInterrupt), outcome
        assert values() in ([0, 0, 0], [3, 1, 1]), values()

    campaign(make, check, in_packages("distjax"), stride=8, limit=3000)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_interrupt_while_the_files_are_read_does_not_blame_the_disk(trained, checkpointer):
    tree, values, reset = trained

    def make():
        reset()
        return None, lambda: checkpointer.restore({"v0": tree["v0"]}, partial=True)

    def check(_, outcome):
        assert isinstance(outcome.error, KeyboardInterrupt), outcome
        assert values() in ([0, 0, 0], [0, 1, 0]), values()

    campaign(make, check, READING, stride=9, limit=2000, may_be_none=True)


def test_a_restore_after_an_interrupted_one_is_whole(trained, checkpointer):
    tree, values, reset = trained

    def make():
        reset()
        return None, lambda: checkpointer.restore(tree)

    def check(*_):
        checkpointer.restore(tree)
        assert values() == [3, 1, 1]

    campaign(make, check, in_packages("distjax"), stride=40, limit=3000)
