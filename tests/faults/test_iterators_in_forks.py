"""An iterator in a forked child, where its thread does not run, does not wait for ever."""

import os
import signal
import sys
import threading
import warnings

import numpy as np
import pytest

import distjax as dj
from tests.faults.four_parts import is_explained

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
    threading.Condition.wait = _require_another_thread(threading.Condition.wait)
    try:
        return str(call())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _require_another_thread(wait):
    def checked(self, timeout=None):
        if timeout is None and threading.active_count() == 1:
            raise BaseException("waits for ever")  # there is nobody who could notify it
        return wait(self, timeout)

    return checked


@pytest.mark.skipif(not hasattr(os, "fork"), reason=f"{sys.platform} has no fork")
@pytest.mark.parametrize("method", ["next", "take"])
def test_the_next_element_in_a_fork_is_there_or_an_error_in_four_parts(pair, method):
    asked, go_on = threading.Event(), threading.Event()
    iterator = iter(pair.distribute_dataset(source(asked, go_on), dj.InputOptions(prefetch=4)))
    next(iterator)
    assert asked.wait(SECONDS)
    take = {"next": lambda: next(iterator), "take": lambda: iterator.take(1)}[method]
    text = outcome_in_fork(lambda: len([take() for _ in range(2)]))  # no arithmetic in a fork
    go_on.set()
    iterator.close()
    assert is_explained(text) or text == "2", text


@pytest.mark.skipif(not hasattr(os, "fork"), reason=f"{sys.platform} has no fork")
def test_an_iterator_can_be_closed_in_a_fork_and_used_on_in_the_parent(pair):
    asked, go_on = threading.Event(), threading.Event()
    iterator = iter(pair.distribute_dataset(source(asked, go_on), dj.InputOptions(prefetch=4)))
    next(iterator)
    assert asked.wait(SECONDS)
    assert outcome_in_fork(iterator.close) == "None"
    go_on.set()
    assert [int(np.ravel(element.stacked)[0]) for element in iterator] == [1, 2]
