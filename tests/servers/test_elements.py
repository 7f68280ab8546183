"""Elements by number: each is drawn once, whatever is peeked at, given back and restored."""

import threading
from concurrent.futures import CancelledError

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.servers.board import Board, Numbers, Worker
from distjax.servers.closure import Call, Closure
from distjax.servers.elements import Cursor, DataEnded, Elements
from distjax.servers.engine import WorkerDied
from distjax.servers.per_worker import PerWorkerIterator


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
    cursor = Cursor(Elements(SOURCES[source]))
    assert cursor.peek() == 1
    cursor.restore(cursor.position())
    first, second = cursor.draw(), cursor.draw()
    assert (first, second) == (1, 2)
    cursor.give_back(first)  # the other one is used
    position = cursor.position()
    if source != "one iterator":
        assert [cursor.draw(), cursor.draw(), cursor.draw()] == [1, 3, 4]
    cursor.restore(position)
    assert [cursor.draw(), cursor.draw(), cursor.draw()] == [1, 3, 4]


def test_a_source_may_ask_for_the_position():
    """As one does that takes a snapshot now and then, where `next` is called by hand."""
    positions, drawn = [], []

    def source():
        for i in range(2):
            positions.append(cursor.position().num_read)
            yield i

    cursor = Cursor(Elements(source))
    drawing = threading.Thread(target=lambda: drawn.extend([cursor.draw(), cursor.draw()]))
    drawing.daemon = True
    drawing.start()
    drawing.join(20)
    assert (positions, drawn) == ([0, 1], [0, 1])


def test_a_restore_that_is_refused_changes_nothing():
    source = iter([1, 2, 3])
    cursor = Cursor(Elements(lambda: source))
    cursor.draw()
    position = cursor.position()
    cursor.draw()
    assert cursor.peek() == 3
    with pytest.raises(ValueError, match="^restore needs a per-worker dataset that can be read"):
        cursor.restore(position)
    assert cursor.draw() == 3


@pytest.mark.parametrize("error", [WorkerDied("lost"), KeyError("mine"), DataEnded()])
def test_elements_are_given_back_when_another_source_has_none(error):
    def failing():
        raise error
        yield

    first, second = (
        PerWorkerIterator({0: Cursor(Elements(make))}) for make in (lambda: [1, 2], failing)
    )
    closure = Closure("step", lambda drawn: None, (first, second))
    if isinstance(error, DataEnded):
        assert closure.prepare(0) is second
    else:
        with pytest.raises(type(error)):
            closure.prepare(0)
    assert first.draw(0) == 1


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), DataEnded()])
def test_next_gives_back_what_it_has_drawn_when_another_worker_has_none(error):
    def failing():
        raise error
        yield

    iterator = PerWorkerIterator(
        {0: Cursor(Elements(lambda: [1, 2])), 1: Cursor(Elements(failing))}
    )
    with pytest.raises(StopIteration if isinstance(error, DataEnded) else type(error)):
        next(iterator)
    assert iterator.draw(0) == 1


class Held:
    """A closure that adds an element in two pushes, and is held at a point of it."""

    def __init__(self, point, elements, workers=1):
        self.point, self.arrived, self.let_go = point, threading.Event(), threading.Event()
        engine = dj.servers.ThreadEngine(fault=self.hold)
        self.strategy = dj.ParameterServerStrategy(workers, engine=engine)
        with self.strategy.scope():
            self.first, self.second = (dj.Variable(0, name=name) for name in "ab")
        self.coordinator = dj.Coordinator(self.strategy)
        data = [np.int32(x) for x in elements]
        self.iterator = iter(self.coordinator.create_per_worker_dataset(data))
        self.value = self.schedule()
        self.arrived.wait()

    def hold(self, point, worker, closure):
        if closure == 0 and point == self.point:
            self.arrived.set()
            self.let_go.wait()

    def step(self, x):
        self.second.assign_add(jnp.sign(self.first.assign_add(x)))

    def schedule(self):
        return self.coordinator.schedule(self.step, args=(self.iterator,))

    def cancel(self):
        self.coordinator.cancel()
        self.let_go.set()
        self.coordinator.join()


@pytest.mark.parametrize("point", ["pull", "before_push", "after_push"])
def test_what_a_stopped_closure_has_not_pushed_is_drawn_again(point):
    held = Held(point, [1, 2, 4])
    with held.coordinator:
        held.cancel()
        *_, last = [held.schedule() for _ in range(3)]
        held.coordinator.join()
    assert held.first.value == 1 + 2 + 4
    if point != "after_push":
        assert last.fetch() is None and held.second.value == 3
        with pytest.raises(CancelledError, match="Why: coordinator.cancel"):
            held.value.fetch()
        return
    assert held.second.value == 2
    with pytest.raises(dj.errors.EndOfDataError):
        last.fetch()
    with pytest.raises(CancelledError) as error:
        held.value.fetch()
    assert str(error.value) == CUT_SHORT
    assert "coordinator.cancel() was called" in str(error.value.__cause__)


CUT_SHORT = """\
fetch needs closure 0 (step) to be run to its end.
  Got: one that was stopped when a server had applied a push of it.
  Why: other pushes of it are not made, and the elements that it drew are used up.
  Fix: coordinator.restore() goes back to a snapshot, which has whole closures only"""


def test_data_that_had_ended_has_not_once_an_element_is_given_back():
    held = Held("before_push", [5], workers=2)
    with held.coordinator as coordinator:
        board = coordinator._board
        has_ended = lambda: any(worker.ended for worker in board.workers.values())
        held.schedule()
        assert board.waiters.wait_until(has_ended, timeout=60)
        held.cancel()
        assert not has_ended()
        held.schedule().fetch()
    assert held.first.value == 5


def test_a_closure_that_waits_for_another_worker_gives_back_what_it_has_drawn():
    cursor = PerWorkerIterator({0: Cursor(Elements(lambda: [1, 2]))})
    closure = Closure("step", lambda drawn: Call(None, tuple(drawn.values())), (cursor,))
    board, worker = (
        Board(1, 3, lambda number: None, lambda number: False, Numbers()),
        Worker(0),
    )
    board.workers[0] = worker
    board.put(closure)
    assert board.take(worker, wait=False) is closure and closure.prepare(0) is None
    board.retry(closure, worker, WorkerDied("lost"))
    board.cancel("the test")
    assert board.take(worker, wait=False) is closure and not closure.is_over
    with pytest.raises(CancelledError, match="Why: the test") as stop:
        closure.as_task()
    board.end(closure, stop.value)
    assert closure.is_over and board.is_empty() and cursor.draw(0) == 1
