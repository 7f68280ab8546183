"""A signal that raises while a step is saved or restored: it goes on, and is awaited."""

import signal
import threading

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import distjax as dj


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


@pytest.mark.parametrize("interrupted_at", [0, 1, 2])
def test_an_interrupted_restore_is_whole_or_nothing(
    pair, checkpointer, monkeypatch, interrupted_at
):
    """A signal before the assignments, between them, and before the first read."""
    with pair.scope():
        tree = [dj.Variable(jnp.ones(3)) for _ in range(2)]
    checkpointer.save(1, tree)
    checkpointer.wait()
    for variable in tree:
        variable.assign(jnp.zeros(3))
    assign, assigned = dj.Variable.assign, []
    main = threading.main_thread()

    def interrupting(variable, value):
        if len(assigned) == interrupted_at:
            signal.pthread_kill(main.ident, signal.SIGALRM)
        assigned.append(assign(variable, value))

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with monkeypatch.context() as patch, pytest.raises(Alarm):
            patch.setattr(dj.Variable, "assign", interrupting)
            checkpointer.restore(tree)
            ring()  # restored before the third signal
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [float(v.value[0]) for v in tree] == [1, 1]


def test_a_signal_while_orbax_reads_is_no_damaged_file(pair, checkpointer, monkeypatch):
    """Orbax takes what is raised in it for an error of its own."""
    with pair.scope():
        tree = [dj.Variable(jnp.zeros(3))]
    checkpointer.save(1, [jnp.ones(3)])
    checkpointer.wait()
    restore, go_on, main = ocp.Checkpointer.restore, threading.Event(), threading.main_thread()

    def slow(*args, **kwargs):
        signal.pthread_kill(main.ident, signal.SIGALRM)
        assert go_on.wait(60)
        return restore(*args, **kwargs)

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with monkeypatch.context() as patch, pytest.raises(Alarm):
            patch.setattr(ocp.Checkpointer, "restore", slow)
            checkpointer.restore(tree)
    finally:
        signal.signal(signal.SIGALRM, before)
    go_on.set()
    assert float(tree[0].value[0]) == 0
    checkpointer.restore(tree)
    assert float(tree[0].value[0]) == 1
