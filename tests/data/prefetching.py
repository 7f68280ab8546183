"""Iterators with a background thread, and the threads there are, for tests."""

import itertools
import threading

import numpy as np
import pytest

import distjax as dj
from distjax._src.data.iterator import THREAD_NAME

SECONDS = 60


def prefetchers():
    """Those that run; Python 3.13 goes on listing one whose start an interrupt ended."""
    living = threading.enumerate()
    return {t for t in living if t.name.startswith(THREAD_NAME) and t.is_alive()}


@pytest.fixture(autouse=True)
def no_thread_is_left(collect_garbage):
    before = prefetchers()
    yield
    if prefetchers() - before:
        collect_garbage()
    for thread in prefetchers() - before:
        thread.join(SECONDS)
        assert not thread.is_alive(), "the test leaked a thread"


def endless():
    for i in itertools.count():
        yield np.array([i, i + 1], np.int32)


def started(strategy, source=None, prefetch=2):
    """Returns an iterator that has given one element, and its thread."""
    before = prefetchers()
    source = endless() if source is None else source
    iterator = iter(strategy.distribute_dataset(source, dj.InputOptions(prefetch=prefetch)))
    next(iterator)
    (thread,) = prefetchers() - before
    return iterator, thread


def assert_ends(thread):
    thread.join(SECONDS)
    assert not thread.is_alive()
