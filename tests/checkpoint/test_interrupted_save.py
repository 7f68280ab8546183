"""A signal that raises while a step is saved: the save goes on, and is awaited."""

import signal
import threading

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest


class Alarm(BaseException):
    """Raised where the program stands, as KeyboardInterrupt is."""


def ring(*_):
    raise Alarm


@pytest.mark.parametrize("method", ["save", "wait_until_finished"])
def test_an_interrupted_save_is_whole(method, checkpointer, monkeypatch):
    tree, go_on = {"x": jnp.arange(4)}, threading.Event()
    original = getattr(ocp.CheckpointManager, method)

    def slow(manager, *args, **kwargs):
        assert go_on.wait(60)
        return original(manager, *args, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, method, slow)
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Alarm):
            checkpointer.save(1, tree)
            checkpointer.wait()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    go_on.set()
    assert checkpointer.all_steps() == [1]
    np.testing.assert_array_equal(checkpointer.restore(tree)["x"], jnp.arange(4))
    checkpointer.save(2, tree)
    assert checkpointer.all_steps() == [1, 2]
