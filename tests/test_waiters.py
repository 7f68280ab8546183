"""Waits that a signal may end anywhere."""

import gc
import signal
import threading

import pytest

from distjax._src.interrupts import Waiters
from tests.interrupts import in_codes, interrupted

SECONDS = 60


class Alarm(BaseException):
    """Raised where the program stands, as KeyboardInterrupt is."""


@pytest.fixture
def raise_alarm():
    """Returns a function, for any thread, that makes the main thread raise `Alarm`."""

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


def test_a_ring_is_heard_by_all_who_wait():
    waiters, ended, is_open = Waiters(), [], []

    def wait():
        ended.append(waiters.wait_until(lambda: is_open))

    threads = [threading.Thread(target=wait, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    waiters.ring()
    is_open.append(True)
    waiters.ring()
    for thread in threads:
        thread.join(SECONDS)
    assert ended == [True] * 3
    assert not waiters.wait_until(lambda: False, timeout=0)


def test_a_wait_that_a_signal_ends_leaves_nothing_behind():
    waiters = Waiters()
    for n in range(1, 7):  # up to the wait itself
        wait = lambda: waiters.wait_until(lambda: False, timeout=0)
        assert interrupted(wait, n, in_codes({Waiters.wait_until.__code__})).line is not None
        assert not waiters._waiting


def test_others_may_begin_to_wait_in_a_garbage_collection(collect_garbage):
    """Python 3.11 collects as it makes the tuples of a dict's items."""
    waiters = Waiters()
    waiters._waiting = {i: lambda: False for i in range(5000)}  # more than Python has tuples for

    def wait(phase, info):
        waiters._waiting[object()] = lambda: False

    thresholds = gc.get_threshold()
    gc.callbacks.append(wait)
    gc.set_threshold(1)
    try:
        waiters.ring()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(wait)
