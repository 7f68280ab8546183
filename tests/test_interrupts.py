"""Ctrl-C waits while it is held, and goes to whichever handler the user has set."""

import signal
import threading

import pytest

from distjax._src.interrupts import interrupts


@pytest.fixture(autouse=True)
def own_handler():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
    assert interrupts.depth == 0 and interrupts.waiting is None


def ctrl_c():
    signal.raise_signal(signal.SIGINT)


def test_it_is_raised_at_the_end():
    after = []
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        with interrupts.held():
            ctrl_c()
            after.append(1)
        after.append(2)
    assert after == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_the_handler_of_the_user_is_called():
    seen = []
    with interrupts.held():
        pass
    former = signal.signal(signal.SIGINT, lambda *_: seen.append("own"))
    with interrupts.held():
        ctrl_c()
        assert seen == []
    assert seen == ["own"]
    signal.signal(signal.SIGINT, former)  # put back, as a context of the user does
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        ctrl_c()
    assert seen == ["own"]


def test_a_handler_that_calls_the_one_before():
    seen = []
    with interrupts.held():
        pass
    former = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *args: (seen.append(1), former(*args)))
    with pytest.raises(KeyboardInterrupt), interrupts.held():
        ctrl_c()
    assert seen == [1]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_is_no_function_stays(handler):
    signal.signal(signal.SIGINT, handler)
    with interrupts.held():
        assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_hold_nothing():
    held = []
    thread = threading.Thread(target=lambda: held.append(interrupts.hold()))
    thread.start()
    thread.join()
    assert held == [False]
