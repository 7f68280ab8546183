"""An iterator in a forked child, where its thread does not run, can be closed."""

import os
import signal
import sys
import threading
import warnings

import numpy as np
import pytest

import distjax as dj

SECONDS = 20  # the child's life at most, should it hang in C


def source(asked, go_on):
    """Yields two arrays, then tells that a third was asked for, and waits."""
    yield np.full(2, 0)
    yield np.full(2, 1)
    asked.set()
    assert go_on.wait(2 * SECONDS)
    yield np.full(2, 2)


def outcome_in_fork(call):
    """Returns the text that ``call()`` returned or raised in a forked child; '' if it died."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX and Python warn of forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            os.write(writing, _text_of(call).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            return pipe.read().decode()
    finally:
        os.waitpid(pid, 0)


def _text_of(call):
    try:
        return str(call())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.skipif(not hasattr(os, "fork"), reason=f"{sys.platform} has no fork")
def test_an_iterator_can_be_closed_in_a_fork_and_used_on_in_the_parent(pair):
    asked, go_on = threading.Event(), threading.Event()
    iterator = iter(pair.distribute_dataset(source(asked, go_on), dj.InputOptions(prefetch=4)))
    next(iterator)
    assert asked.wait(SECONDS)
    assert outcome_in_fork(iterator.close) == "None"
    go_on.set()
    assert [int(np.ravel(element.stacked)[0]) for element in iterator] == [1, 2]
