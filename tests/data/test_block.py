"""The memory of K steps on the host: filled once, in place, by devices."""

import numpy as np
import pytest

import distjax as dj

ROWS = 16  # float32: 64 bytes, so that the part of each replica is aligned


@pytest.fixture(params=[0, 7])
def options(request):
    return dj.InputOptions(prefetch=request.param)


def values(steps):
    """The first number of every step."""
    return np.asarray(steps.arrays).reshape(steps.num_steps, -1)[:, 0].tolist()


def test_memory_is_not_filled_again(pair, options):
    data = (np.full((2, ROWS), i, np.float32) for i in range(12))
    iterator = iter(pair.distribute_dataset(data, options))
    held = [iterator.take(3) for _ in range(4)]
    assert [values(steps) for steps in held] == np.arange(12).reshape(4, 3).tolist()


def test_an_element_of_another_shape_is_kept_as_it_came(pair):
    """It ends the steps before it, and its source may change it before it is taken."""
    batches = [np.zeros((4, 2)), np.zeros((4, 2)), np.ones((2, 2))]
    iterator = iter(pair.distribute_dataset(iter(batches), dj.InputOptions(prefetch=0)))
    assert iterator.take(5).num_steps == 2
    batches[2][:] = 9
    assert values(iterator.take(5)) == [1]


# -- whose memory ----------------------------------------------------------------


def reusing(count):
    """One buffer, filled anew for each batch."""
    batch = np.empty((2, ROWS), np.float32)
    for i in range(count):
        batch[:] = i
        yield batch


def first_numbers(pair, dataset):
    elements = list(dataset)  # all of them first: what the devices hold must not change
    return [[float(v.ravel()[0]) for v in pair.local_results(x)] for x in elements]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_source_that_fills_one_buffer_again_corrupts_nothing(pair, prefetch):
    options = dj.InputOptions(prefetch=prefetch)
    split = pair.distribute_dataset(reusing(5), options)
    assert first_numbers(pair, split) == [[i, i] for i in range(5)]
    each = pair.distribute_datasets_from_function(lambda _: reusing(6), options)
    assert first_numbers(pair, each) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_without_a_copy_no_memory_is_made_for_an_element(pair, prefetch, monkeypatch):
    options = dj.InputOptions(prefetch=prefetch, copy=False)
    data = [np.full((2, ROWS), i, np.float32) for i in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(np, "stack", None)
        assert first_numbers(pair, pair.distribute_dataset(data, options)) == [
            [i, i] for i in range(5)
        ]
    iterator = iter(pair.distribute_dataset(data, options))
    assert values(iterator.take(2)) == [0, 1]  # several steps are one array, so they are copied
    assert float(np.asarray(next(iterator).stacked).ravel()[0]) == 2
    assert values(iterator.take(5)) == [3, 4]
