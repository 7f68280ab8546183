"""An interrupt in `next(iterator)` loses no element: the next call returns it."""

import threading

import numpy as np
import pytest

import distjax as dj
from tests.interrupts import campaign, in_packages

OURS = in_packages("distjax")
LENGTH, HELD_AT = 6, 3


class Source:
    """Arrays 0 to LENGTH - 1, of which those from HELD_AT on wait until `go_on` is set.

    Attributes:
      is_asked: set when HELD_AT is asked for: a thread has placed all before it, and rests.
    """

    def __init__(self):
        self.is_asked, self.go_on = threading.Event(), threading.Event()

    def __iter__(self):
        for number in range(LENGTH):
            if number == HELD_AT:
                self.is_asked.set()
                assert self.go_on.wait(60)
            yield np.full(2, number)


def numbers(elements):
    """Returns the number that each element is made of."""
    return [int(np.ravel(element.stacked)[0]) for element in elements]


def require_all(case, outcome):
    """Asserts that what was taken, with what is left, is every element once and in order."""
    iterator, taken = case
    assert isinstance(outcome.error, KeyboardInterrupt), outcome
    found = numbers([*taken, *iterator])
    assert found == [*range(LENGTH)], found


def without_thread(strategy, num_taken):
    """Returns an iterator without a thread, and the elements taken from it."""
    batches = [np.full(2, number) for number in range(LENGTH)]
    iterator = iter(strategy.distribute_dataset(batches, dj.InputOptions(prefetch=0)))
    return iterator, [next(iterator) for _ in range(num_taken)]


def test_each_line_of_a_call_that_takes_what_a_thread_prepared(pair):
    def make():
        source = Source()
        options = dj.InputOptions(prefetch=LENGTH)
        iterator = iter(pair.distribute_dataset(source, options))
        taken = [next(iterator)]
        assert source.is_asked.wait(60)
        return (source, iterator, taken), lambda: taken.append(next(iterator))

    def check(case, outcome):
        source, *case = case
        source.go_on.set()
        require_all(case, outcome)

    campaign(make, check, OURS, limit=500)


@pytest.mark.parametrize("num_taken", [0, 1])
def test_each_line_of_a_call_without_a_thread(pair, num_taken):
    def make():
        iterator, taken = without_thread(pair, num_taken)
        return (iterator, taken), lambda: taken.append(next(iterator))

    campaign(make, require_all, OURS, stride=3, limit=1000)


def test_each_line_of_taking_several_at_once(pair):
    def make():
        iterator, taken = without_thread(pair, 0)
        return (iterator, taken), lambda: iterator.take(2)

    campaign(make, require_all, OURS, stride=4, limit=1000)


def test_the_position_after_an_interrupt_is_that_of_what_was_returned(pair):
    def make():
        iterator, _ = without_thread(pair, 1)
        return iterator, lambda: next(iterator)

    def check(iterator, outcome):
        assert iterator.get_state()["delivered"] == 1

    campaign(make, check, OURS, stride=3, limit=1000)
