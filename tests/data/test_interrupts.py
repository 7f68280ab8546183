"""Ctrl-C in a call of an iterator: it may lose what is in hand, and nothing else."""

import numpy as np
import pytest

import distjax as dj
from tests.data.prefetching import no_thread_is_left  # noqa: F401  (a fixture)
from tests.data.test_refused_states import LENGTH, SOURCES, value
from tests.interrupts import Interrupt, in_packages, interrupted

OURS = in_packages("distjax")
COUNT = 40
PAIR = dj.VirtualStrategy(2)
LINES = range(1, 2000, 3)


def make_iterator(prefetch, source=None):
    source = [np.full(2, i) for i in range(COUNT)] if source is None else source
    return iter(PAIR.distribute_dataset(source, dj.InputOptions(prefetch=prefetch)))


def first_numbers(element):
    """Returns the first number of each step of an element, or of `Steps`."""
    array = element.arrays if hasattr(element, "num_steps") else element.stacked[None]
    return np.asarray(array)[:, 0, 0].tolist()


def resumed_at(state):
    iterator = make_iterator(0)
    iterator.set_state(state)
    return value(next(iterator))


CALLS = {"next": next, "take": lambda it: it.take(3)}


@pytest.mark.parametrize("later", CALLS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_position_says_what_was_delivered(prefetch, call, later):
    """At every third line: what comes later is in order, none twice, and few are missing."""
    for n in LINES:
        iterator = make_iterator(prefetch)
        given = first_numbers(CALLS[later](iterator))
        outcome = interrupted(lambda: CALLS[call](iterator), n, OURS)  # noqa: B023
        line = outcome.line
        if outcome.error is None:
            given += first_numbers(outcome.result)
        else:
            assert isinstance(outcome.error, Interrupt), line
        state = iterator.get_state()
        assert len(given) <= resumed_at(state) <= len(given) + 3, line
        for take in (CALLS[later], CALLS[call]):
            new = first_numbers(take(iterator))
            assert given[-1] < new[0] <= len(given) + 3 * (prefetch or 1), line
            given += new
            assert given == sorted(set(given)), line
            assert resumed_at(iterator.get_state()) == given[-1] + 1, line
        iterator.close()
        if line is None:
            return
    pytest.fail("more lines than were interrupted")


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("source", ["list", "counting", "again", "by item"])
def test_set_state_goes_to_the_position_or_leaves_the_former_one(source, prefetch):
    former = make_iterator(0, SOURCES[source]())
    for _ in range(4):
        next(former)
    state = former.get_state()
    assert ("before" in state) == (source in ("counting", "again"))
    for n in LINES:
        iterator = make_iterator(prefetch, SOURCES[source]())
        assert value(next(iterator)) == 0
        line = interrupted(lambda: iterator.set_state(state), n, OURS).line  # noqa: B023
        delivered = iterator.get_state()["delivered"]
        assert delivered in (1, 4), line
        found = [value(element) for element in iterator]
        assert found == list(range(delivered, LENGTH)), line
        if line is None:
            return
    pytest.fail("more lines than were interrupted")


def test_an_interrupt_while_elements_are_dropped_keeps_the_count():
    """Of a generator, which cannot be read again."""
    for n in LINES:
        iterator = make_iterator(0, (np.full(2, i) for i in range(COUNT)))
        iterator.set_state({"delivered": 20, "consumed": 20, "full_size": 2})
        line = interrupted(lambda: next(iterator), n, OURS).line  # noqa: B023
        element = next(iterator)
        assert iterator.get_state()["consumed"] == value(element) + 1, line
        assert value(element) in (20, 21), line
        if line is None:
            return
    pytest.fail("more lines than were interrupted")
