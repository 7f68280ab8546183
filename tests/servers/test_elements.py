"""Elements by number: each is drawn once, whatever is peeked at, given back and restored."""

import threading
from concurrent.futures import CancelledError

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.servers.board import Closure
from distjax._src.servers.engine import WorkerDied
from distjax._src.servers.per_worker import Cursor, DataEnded, Elements, PerWorkerIterator

once = iter([1, 2, 3, 4])
SOURCES = {
    "a list": lambda: [1, 2, 3, 4],
    "one iterator": lambda: once,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_restore_has_what_was_peeked_at_and_given_back(source):
    cursor = Cursor(Elements(SOURCES[source]))
    cursor.give_back(cursor.draw())
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


def test_what_is_cancelled_has_drawn_nothing_and_what_has_drawn_is_run():
    """So each element is applied once, also that of a closure whose worker was lost."""
    arrived, let_go, lost = threading.Event(), threading.Event(), []

    def hold(point, worker, closure):
        if point == "after_push" and not lost:
            lost.append(closure)
            arrived.set()
            let_go.wait()
            raise WorkerDied(point)

    engine = dj.servers.ThreadEngine(fault=hold)
    strategy = dj.ParameterServerStrategy(1, engine=engine)
    with strategy.scope():
        first, second = dj.Variable(0, name="a"), dj.Variable(0, name="b")

    def step(x):
        second.assign_add(jnp.sign(first.assign_add(x)))  # two pushes

    with dj.Coordinator(strategy) as coordinator:
        data = [np.int32(x) for x in (1, 2, 4)]
        iterator = iter(coordinator.create_per_worker_dataset(data))
        begun, queued = [coordinator.schedule(step, args=(iterator,)) for _ in range(2)]
        arrived.wait()
        coordinator.cancel()
        let_go.set()
        coordinator.join()
        assert begun.fetch() is None and (first.value, second.value) == (1, 1)
        with pytest.raises(CancelledError, match="Why: coordinator.cancel"):
            queued.fetch()
        for _ in range(2):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
    assert (first.value, second.value) == (1 + 2 + 4, 3)
