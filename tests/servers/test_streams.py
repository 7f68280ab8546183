"""Streams of elements: each is drawn once, whatever is peeked at, given back and restored."""

import pytest

from distjax.servers.closure import Closure
from distjax.servers.engine import WorkerDied
from distjax.servers.per_worker import PerWorkerIterator
from distjax.servers.streams import DataEnded, Stream


class Counting:
    """An iterator over 1, 2, ... that knows its position."""

    def __init__(self):
        self.last = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.last += 1
        return self.last

    def get_state(self):
        return self.last

    def set_state(self, state):
        self.last = state


once = iter([1, 2, 3, 4])
SOURCES = {
    "a list": lambda: [1, 2, 3, 4],
    "an iterator with a state": Counting,
    "one iterator": lambda: once,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_restore_has_what_was_peeked_at_and_given_back(source):
    stream = Stream(SOURCES[source])
    assert stream.peek() == 1
    stream.restore(stream.position())
    first, second = stream.draw(), stream.draw()
    assert (first, second) == (1, 2)
    stream.give_back(first)  # the other one is used
    position = stream.position()
    if source != "one iterator":
        assert [stream.draw(), stream.draw(), stream.draw()] == [1, 3, 4]
    stream.restore(position)
    assert [stream.draw(), stream.draw(), stream.draw()] == [1, 3, 4]


def test_a_restore_that_is_refused_changes_nothing():
    source = iter([1, 2, 3])
    stream = Stream(lambda: source)
    stream.draw()
    position = stream.position()
    stream.draw()
    assert stream.peek() == 3
    with pytest.raises(ValueError, match="^restore needs a per-worker dataset that can be read"):
        stream.restore(position)
    assert stream.draw() == 3


@pytest.mark.parametrize("error", [WorkerDied("lost"), KeyError("mine"), DataEnded()])
def test_elements_are_given_back_when_another_source_has_none(error):
    def failing():
        raise error
        yield

    first, second = (PerWorkerIterator({0: Stream(make)}) for make in (lambda: [1, 2], failing))
    closure = Closure("step", lambda drawn: None, (first, second))
    if isinstance(error, DataEnded):
        assert closure.prepare(0) is second
    else:
        with pytest.raises(type(error)):
            closure.prepare(0)
    assert first.draw(0) == 1
