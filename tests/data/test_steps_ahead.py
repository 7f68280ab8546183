"""K steps read ahead by the thread: nothing lost, nothing early, nothing left running."""

import threading
import traceback

import numpy as np
import pytest

import distjax as dj
from distjax._src.data.iterator import THREAD_NAME
from tests.replicas import local

SECONDS = 60
COUNT = 7


class SourceError(Exception):
    pass


@pytest.fixture(params=[0, 1, 3, 9])
def options(request):
    return dj.InputOptions(prefetch=request.param)


def numbers(stop=COUNT, error=None):
    for i in range(stop):
        yield np.array([i, i + 100])
    if error is not None:
        raise error


def firsts(steps):
    return np.asarray(steps.arrays)[:, 0, 0].tolist()


def prefetchers():
    return {t for t in threading.enumerate() if t.name.startswith(THREAD_NAME)}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8])
def test_order_state_and_the_end_within_k(pair, options, size):
    iterator = iter(pair.distribute_dataset(numbers(), options))
    found = []
    while len(found) < COUNT:
        taken = firsts(iterator.take(size))
        assert len(taken) == min(size, COUNT - len(found))
        found += taken
        assert iterator.get_state()["delivered"] == len(found)
    assert found == list(range(COUNT))
    for _ in range(2):
        with pytest.raises(StopIteration):
            iterator.take(size)
    assert iterator.get_state()["consumed"] == COUNT


@pytest.mark.parametrize("position", range(COUNT))
def test_an_error_at_any_position(pair, options, position):
    """After all steps before it, with its traceback, once."""
    iterator = iter(pair.distribute_dataset(numbers(position, SourceError("gone")), options))
    found = []
    with pytest.raises(SourceError, match="^gone$") as e:
        while True:
            found += firsts(iterator.take(3))
    assert found == list(range(position))
    assert traceback.extract_tb(e.value.__traceback__)[-1].name == "numbers"
    assert iterator.get_state()["delivered"] == position
    with pytest.raises(StopIteration):
        iterator.take(3)


@pytest.mark.parametrize("taken", [1, 2])
def test_a_plain_next_after_steps(pair, options, taken):
    iterator = iter(pair.distribute_dataset(numbers(9), options))
    for _ in range(taken):
        iterator.take(3)
    for i in range(3 * taken, 9):
        assert local(pair, next(iterator)) == [[i], [i + 100]]
        assert iterator.get_state()["delivered"] == i + 1


def test_resumed_between_steps(pair, options):
    dataset = pair.distribute_dataset([np.array([i, i]) for i in range(COUNT)], options)
    iterator = iter(dataset)
    iterator.take(3)
    state = iterator.get_state()
    assert (state["delivered"], state["consumed"], state["full_size"]) == (3, 3, 2)
    resumed = iter(dataset)
    resumed.set_state(state)
    assert firsts(resumed.take(2)) == [3, 4]
    iterator.set_state(state)
    assert firsts(iterator.take(9)) == [3, 4, 5, 6]


def test_one_k_is_read_ahead_by_default(pair):
    """`prefetch` counts elements; a thread that runs at all reads one K ahead."""
    read, changed = [], threading.Condition()

    def source():
        for x in numbers(100):
            with changed:
                read.append(x)
                changed.notify_all()
            yield x

    iterator = iter(pair.distribute_dataset(source()))
    iterator.take(10)
    with changed:
        assert changed.wait_for(lambda: len(read) >= 20, SECONDS)
    iterator.close()
    assert len(read) == 20


# -- in the loop that runs them --------------------------------------------------


def summing(strategy):
    """Returns a variable, and a step function that adds its input to it."""
    with strategy.scope():
        total = dj.Variable(0)

    def step(context, x):
        total.assign_add(strategy.reduce("sum", x, axis=0))
        context.set_last_step_output("total", total.value)

    return total, step


def test_run_steps_and_next_can_be_mixed(pair, options):
    total, step = summing(pair)
    iterator = iter(pair.distribute_dataset(numbers(9), options))
    run = pair.extended.run_steps_on_iterator
    assert int(run(step, iterator, 3).last_step_outputs["total"]) == 306
    assert local(pair, next(iterator)) == [[3], [103]]
    assert run(step, iterator, 4).iterations == 4
    assert iterator.get_state()["delivered"] == 8
    assert int(total.value) == sum(2 * i + 100 for i in (0, 1, 2, 4, 5, 6, 7))
    assert run(step, iterator, 4).iterations == 1
    with pytest.raises(StopIteration):
        run(step, iterator, 4)


@pytest.mark.pairwise
@pytest.mark.parametrize("position", [0, 1, 3, 4])
def test_run_steps_raises_the_error_of_the_source(pair, options, position):
    """The steps before it have run."""
    total, step = summing(pair)
    iterator = iter(pair.distribute_dataset(numbers(position, SourceError("gone")), options))
    with pytest.raises(SourceError, match="^gone$"):
        while True:
            pair.extended.run_steps_on_iterator(step, iterator, 3)
    assert int(total.value) == sum(2 * i + 100 for i in range(position))
