"""Calls that a signal does not stop half-way, and waits that it may stop anywhere."""

import gc
import signal
import threading

import pytest

from distjax.uninterrupted import UninterruptedCalls, Waiters, _Call, find_interrupt
from tests.interrupts import in_codes, interrupted

SECONDS = 60


class Alarm(BaseException):
    """Raised where the program stands, as KeyboardInterrupt is."""


@pytest.fixture
def calls():
    calls = UninterruptedCalls()
    yield calls
    calls.close()


@pytest.fixture
def raise_alarm():
    """Returns a function, for any thread, that makes the main thread raise `Alarm`."""

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("method", ["call", "complete"])
def test_results_and_errors_come_back(calls, method):
    call = getattr(calls, method)
    assert call(lambda: 3) == 3
    assert call(threading.current_thread) is not threading.current_thread()
    with pytest.raises(KeyError, match="of the call"):
        call(lambda: {}["of the call"])
    calls.close()
    assert call(lambda: 4) == 4


def test_a_signal_ends_the_wait_for_a_call(calls, raise_alarm):
    go_on, done = threading.Event(), []

    def work():
        raise_alarm()
        assert go_on.wait(SECONDS)
        done.append(True)

    with pytest.raises(Alarm):
        calls.call(work)
    assert not done
    go_on.set()
    assert calls.call(lambda: list(done)) == [True]  # the next call waits for it


def test_a_signal_waits_for_a_change_that_has_begun(calls, monkeypatch):
    begun, go_on, done = threading.Event(), threading.Event(), []
    wait = _Call.wait

    def interrupted(_):
        assert begun.wait(SECONDS)
        raise Alarm

    def wait_after_all(call):
        go_on.set()
        wait(call)

    def work():
        begun.set()
        assert go_on.wait(SECONDS)
        done.append(True)

    with monkeypatch.context() as patch, pytest.raises(Alarm):
        patch.setattr(_Call, "result", interrupted)
        patch.setattr(_Call, "wait", wait_after_all)
        calls.complete(work)
    assert done == [True]


def test_a_change_that_has_not_begun_does_not(calls, monkeypatch):
    def interrupted(_):
        raise Alarm

    done, blocked = [], threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(_Call, "result", interrupted)
        with pytest.raises(Alarm):
            calls.call(lambda: blocked.wait(SECONDS))  # the thread is busy
        with pytest.raises(Alarm):
            calls.complete(lambda: done.append("change"))
    blocked.set()
    assert calls.call(lambda: list(done)) == []


def test_a_signal_while_the_thread_starts(calls, monkeypatch):
    def start(self):
        try:
            raise Alarm
        finally:
            raise RuntimeError("release unlocked lock")  # as a lock of `threading` does

    with monkeypatch.context() as patch, pytest.raises(Alarm):
        patch.setattr(threading.Thread, "start", start)
        calls.call(lambda: 3)
    assert calls.call(lambda: 3) == 3
    plain = RuntimeError("can't start new thread")
    assert find_interrupt(plain) is plain


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
