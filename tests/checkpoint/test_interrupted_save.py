"""Ctrl-C while a step is saved or restored: it goes on, and is awaited."""

import signal
import threading

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import distjax as dj


def press():
    """Ctrl-C, in the main thread."""
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def then(act, original):
    """Returns `original`, before which ``act()`` is called."""
    return lambda *args, **kwargs: (act(), original(*args, **kwargs))[1]


def require_whole(checkpointer, tree):
    assert checkpointer.all_steps() == [1]
    np.testing.assert_array_equal(checkpointer.restore(tree)["x"], tree["x"])
    checkpointer.save(2, tree)
    assert checkpointer.all_steps() == [1, 2]


def test_a_save_that_is_interrupted_is_whole(checkpointer, monkeypatch):
    tree = {"x": jnp.arange(4)}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ocp.AsyncCheckpointer, "save", then(press, ocp.AsyncCheckpointer.save))
        checkpointer.save(1, tree)
    require_whole(checkpointer, tree)


def test_a_wait_for_a_save_ends_at_once_and_the_save_goes_on(checkpointer, monkeypatch):
    tree, go_on = {"x": jnp.arange(4)}, threading.Event()
    checkpointer.save(1, tree)

    def wait():
        press()
        assert go_on.wait(60)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        original = ocp.AsyncCheckpointer.wait_until_finished
        patch.setattr(ocp.AsyncCheckpointer, "wait_until_finished", then(wait, original))
        checkpointer.wait()
    go_on.set()
    require_whole(checkpointer, tree)


@pytest.mark.parametrize("interrupted_at", [0, 1, 2])
def test_an_interrupted_restore_is_whole_or_nothing(
    pair, checkpointer, monkeypatch, interrupted_at
):
    """Ctrl-C before the first assignment, between them, and after the last."""
    with pair.scope():
        tree = [dj.Variable(jnp.ones(3)) for _ in range(2)]
    checkpointer.save(1, tree)
    checkpointer.wait()
    for variable in tree:
        variable.assign(jnp.zeros(3))
    write, written = dj.Variable.write, []

    def interrupting(variable, value):
        if len(written) == interrupted_at:
            press()
        written.append(write(variable, value))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dj.Variable, "write", interrupting)
        checkpointer.restore(tree)
        press()  # restored before the third
    assert [float(v.value[0]) for v in tree] == [1, 1]


def test_an_interrupt_while_orbax_reads_is_no_damaged_file(pair, checkpointer, monkeypatch):
    """Orbax takes what is raised in it for an error of its own."""
    with pair.scope():
        tree = [dj.Variable(jnp.zeros(3))]
    checkpointer.save(1, [jnp.ones(3)])
    checkpointer.wait()
    go_on = threading.Event()

    def wait():
        press()
        assert go_on.wait(60)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ocp.Checkpointer, "restore", then(wait, ocp.Checkpointer.restore))
        checkpointer.restore(tree)
    go_on.set()
    assert float(tree[0].value[0]) == 0
    checkpointer.restore(tree)
    assert float(tree[0].value[0]) == 1
