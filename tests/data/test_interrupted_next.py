"""An interrupt in `next(iterator)`: what was taken and not returned comes again."""

import os
import signal
import threading

import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError
from tests.data.prefetching import (
    no_thread_is_left,  # noqa: F401  (a fixture)
    started,
)
from tests.data.test_refused_states import LENGTH, SOURCES, batches, value
from tests.interrupts import Interrupt, in_packages, interrupted

OURS = in_packages("distjax.data")
COUNT = 200


def first_numbers(element):
    """Returns the first number of each step of an element, or of `Steps`."""
    if isinstance(element, int):
        return [element]
    array = element.arrays if hasattr(element, "num_steps") else element.stacked[None]
    return np.asarray(array)[:, 0, 0].tolist()


def make_iterator(prefetch):
    source = [np.full(2, i) for i in range(COUNT)]
    dataset = dj.VirtualStrategy(2).distribute_dataset(source, dj.InputOptions(prefetch=prefetch))
    return iter(dataset)


def resume(state):
    resumed = make_iterator(0)
    resumed.set_state(state)
    return int(resumed.get_next().stacked[0, 0])


@pytest.mark.parametrize(
    "calls",
    [
        [lambda it: next(it)],
        [lambda it: it.get_next()],
        [lambda it: it.take(3)],
        [lambda it: next(it), lambda it: it.take(2)],
    ],
    ids=["next", "get_next", "take", "in turn"],
)
@pytest.mark.parametrize("is_started", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_interrupt_at_any_line_loses_and_repeats_nothing(calls, is_started, prefetch):
    for n in range(1, COUNT):
        iterator = make_iterator(prefetch)
        given = []
        if is_started:
            for call in calls:
                given += first_numbers(call(iterator))
        turn = len(calls) - 1
        outcome = interrupted(lambda: calls[turn](iterator), n, OURS)  # noqa: B023
        line = outcome.line
        if outcome.error is None:
            given += first_numbers(outcome.result)
        else:
            assert isinstance(outcome.error, Interrupt), line
            assert resume(iterator.get_state()) == len(given), line
        for call in [*calls, *reversed(calls)]:
            given += first_numbers(call(iterator))
        assert given == list(range(len(given))), line
        assert resume(iterator.get_state()) == len(given)
        iterator.close()
        if line is None:
            break
    assert n > 10


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("source", ["list", "generator", "counting", "again", "rewound", "by item"])
def test_an_interrupt_of_set_state_leaves_the_former_position_or_the_new_one(
    source, taken, prefetch
):
    state = {"delivered": 4, "consumed": 4}
    if source in ("counting", "again"):
        state["source"] = {"at": 4}
    elif taken and source in ("generator", "rewound"):
        pytest.skip("they cannot be read again")
    for n in range(1, COUNT):
        dataset = dj.VirtualStrategy(2).distribute_dataset(
            SOURCES[source](), dj.InputOptions(prefetch=prefetch)
        )
        iterator = iter(dataset)
        for _ in range(taken):
            next(iterator)
        line = interrupted(lambda: iterator.set_state(state), n, OURS).line  # noqa: B023
        delivered = iterator.get_state()["delivered"]
        assert delivered in (taken, 4), line
        assert [value(element) for element in iterator] == list(range(delivered, LENGTH)), line
        if line is None:
            break
    assert n > 10


def test_an_interrupt_while_elements_are_skipped_skips_no_other():
    for n in range(1, COUNT):
        source = (batch for batch in batches())
        dataset = dj.VirtualStrategy(2).distribute_dataset(source, dj.InputOptions(prefetch=0))
        iterator = iter(dataset)
        iterator.set_state({"delivered": 4, "consumed": 4, "full_size": 4})
        line = interrupted(lambda: next(iterator), n, OURS).line  # noqa: B023
        expected = [4, 5] if line is not None else [5]
        assert [value(element) for element in iterator] == expected, line
        if line is None:
            break
    assert n > 50


def test_after_an_interrupt_the_rest_comes_up_to_the_end():
    for n in range(1, COUNT):
        iterator = iter(
            dj.VirtualStrategy(2).distribute_dataset(
                [np.full(2, i) for i in range(3)], dj.InputOptions(prefetch=1)
            )
        )
        given = []

        def read_all(given=given, iterator=iterator):
            for element in iterator:
                given += first_numbers(element)

        line = interrupted(read_all, n, OURS).line
        read_all()
        assert given == [0, 1, 2], line
        assert next(iterator, None) is None
        if line is None:
            break
    assert n > 50


def test_signals_lose_nothing_and_come_out_as_they_are():
    """What is raised while CPython itself waits, and between any two of its instructions."""

    class Alarm(BaseException):
        pass

    rung = []

    def ring(*_):
        rung.append(True)
        raise Alarm

    iterator = iter(dj.VirtualStrategy(2).distribute_dataset(np.full(2, i) for i in range(10**9)))
    given, alarms = [], 0

    def take():  # a function: Python 3.13 handles signals at the end of a loop outside its `try`
        for element in iterator:
            given.append(element)
            if rung:  # in a callback of the garbage collector, where Python drops it
                return

    before = signal.signal(signal.SIGALRM, ring)
    try:
        while alarms < 200:
            rung.clear()
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 * (1 + alarms % 7))
                take()
            except Alarm:
                pass
            alarms += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        iterator.close()
    numbers = [int(x.stacked[0, 0]) for x in given]
    # CPython handles no signal between the return of the iterator and the call of `append`.
    assert numbers == list(range(len(numbers)))


def test_an_interrupt_while_the_thread_starts_is_that_interrupt(monkeypatch):
    def start(self):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("release unlocked lock")  # as a lock of `threading` does

    iterator = make_iterator(2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", start)
        next(iterator)
    assert first_numbers(next(iterator)) == [0]
    iterator.close()


def test_an_iterator_in_a_forked_process(pair, monkeypatch):
    iterator, _ = started(pair)
    here = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(ContextError) as e:
            next(iterator)
    assert str(e.value) == (
        "an iterator over a dataset needs to be read in the process that began to read it.\n"
        f"  Got: process {here + 1}, forked from process {here}.\n"
        "  Why: the thread that moves elements to the devices ahead of the loop is not in it, so "
        "none would ever come.\n"
        "  Fix: begin in the new process: iterator = iter(dataset); or without a thread: "
        "dj.InputOptions(prefetch=0)"
    )
    assert int(next(iterator).stacked[0, 0]) == 1
    iterator.close()
