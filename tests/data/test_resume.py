"""get_state and set_state: the loop continues at the same example."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distjax as dj
from tests.replicas import local


@pytest.fixture(params=[0, 2, 5])
def prefetch(request):
    return request.param


def batches(count=6):
    return [np.arange(4) + 10 * i for i in range(count)]


def rest(strategy, iterator):
    return [local(strategy, x) for x in iterator]


def advanced(dataset, count):
    iterator = iter(dataset)
    for _ in range(count):
        next(iterator)
    return iterator


@pytest.mark.parametrize("delivered", [0, 1, 4, 6])
def test_resumed_at_the_same_element(pair, prefetch, delivered):
    dataset = pair.distribute_dataset(batches(), dj.InputOptions(prefetch=prefetch))
    iterator = advanced(dataset, delivered)
    state = iterator.get_state()
    expected = rest(pair, iterator)
    assert len(expected) == 6 - delivered
    resumed = iter(dataset)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert rest(pair, resumed) == expected


def test_a_state_is_of_plain_ints_and_counts_what_was_delivered(pair, prefetch):
    dataset = pair.distribute_dataset(batches(), dj.InputOptions(prefetch=prefetch))
    iterator = iter(dataset)
    assert iterator.get_state() == {"delivered": 0, "consumed": 0}
    next(iterator)
    state = iterator.get_state()
    assert state.pop("checksum") > 0
    assert state == {"delivered": 1, "consumed": 1, "full_size": 4}
    assert json.loads(json.dumps(state)) == state
    assert {type(n) for n in state.values()} == {int}
    iterator.take(2)
    assert iterator.get_state()["delivered"] == 3
    assert list(iterator) and iterator.get_state()["delivered"] == 6


def test_set_in_the_middle_and_after_the_end(pair, prefetch):
    dataset = pair.distribute_dataset(batches(), dj.InputOptions(prefetch=prefetch))
    iterator = advanced(dataset, 2)
    state = iterator.get_state()
    expected = rest(pair, iterator)
    iterator.set_state(state)
    assert rest(pair, iterator) == expected
    iterator.set_state(state)
    next(iterator)
    iterator.set_state(state)
    assert rest(pair, iterator) == expected
    iterator.close()
    iterator.set_state(state)
    assert rest(pair, iterator) == expected


def test_a_state_is_the_callers_own(pair):
    iterator = advanced(pair.distribute_dataset(batches()), 1)
    state = iterator.get_state()
    state["delivered"] = 99
    assert iterator.get_state()["delivered"] == 1
    iterator.set_state({"delivered": 1, "consumed": 1})
    assert iterator.get_state() == {"delivered": 1, "consumed": 1}


def test_the_full_size_is_resumed_too(pair):
    data = [np.arange(4), np.arange(2), np.arange(4), np.arange(2)]
    dataset = pair.distribute_dataset(iter_again(data), dj.InputOptions("drop"))
    iterator = advanced(dataset, 1)
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert rest(pair, resumed) == rest(pair, iterator) == [[[0, 1], [2, 3]]]
    padded = pair.distribute_dataset(iter_again(data), dj.InputOptions("pad"))
    resumed = iter(padded)
    resumed.set_state(advanced(padded, 1).get_state())
    assert local(pair, next(resumed).mask) == [[True, True], [False, False]]


def iter_again(data):
    class Source:
        def __iter__(self):
            return iter(data)

    return Source()


def test_elements_of_a_function_resume_at_the_same_example_on_other_replicas():
    """Elements of the source are counted, so that R may change between runs."""

    def fn(context):
        return np.arange(12)

    two, three = dj.VirtualStrategy(2), dj.VirtualStrategy(3)
    state = advanced(two.distribute_datasets_from_function(fn), 3).get_state()
    assert {**state, "checksum": 0} == {"delivered": 3, "consumed": 6, "checksum": 0}
    resumed = iter(three.distribute_datasets_from_function(fn))
    resumed.set_state(state)
    assert rest(three, resumed) == [[6, 7, 8], [9, 10, 11]]


# -- sources that can be resumed themselves --------------------------------------


class Stateful:
    """Iterates over batches; its state is a dict that changes in place."""

    def __init__(self, data):
        self.data = data
        self.reads = 0

    def __iter__(self):
        return StatefulIterator(self)


class StatefulIterator:
    def __init__(self, owner):
        self.owner = owner
        self.state = {"next": 0}

    def __iter__(self):
        return self

    def __next__(self):
        if self.state["next"] == len(self.owner.data):
            raise StopIteration
        self.owner.reads += 1
        self.state["next"] += 1
        return self.owner.data[self.state["next"] - 1]

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_the_sources_own_state_is_that_of_the_last_element_delivered(pair, prefetch):
    source = Stateful(batches())
    dataset = pair.distribute_dataset(source, dj.InputOptions(prefetch=prefetch))
    iterator = advanced(dataset, 3)
    state = iterator.get_state()
    assert state["source"] == {"next": 3}
    expected = rest(pair, iterator)
    source.reads = 0
    resumed = iter(dataset)
    resumed.set_state(state)
    assert rest(pair, resumed) == expected
    assert source.reads == 4  # of what came before, only the last was read again
    assert state["source"] == {"next": 3}


def test_a_source_that_is_its_own_iterator_with_state(pair):
    iterator = iter(pair.distribute_dataset(iter(Stateful(batches()))))
    next(iterator)
    state = iterator.get_state()
    expected = rest(pair, iterator)
    iterator.set_state(state)
    assert rest(pair, iterator) == expected


def test_a_state_with_a_source_for_one_without(pair):
    state = advanced(pair.distribute_dataset(Stateful(batches())), 2).get_state()
    resumed = iter(pair.distribute_dataset(batches()))
    resumed.set_state(state)
    assert len(rest(pair, resumed)) == 4


def test_grain_datasets(pair, prefetch):
    grain = pytest.importorskip("grain", reason="grain is an optional dependency")
    data = (
        grain.MapDataset.range(40)
        .shuffle(seed=7)
        .map(lambda i: {"x": np.float32(i), "y": np.full(2, i)})
        .batch(4)
    )
    options = dj.InputOptions(prefetch=prefetch)
    for made in (data, data.to_iter_dataset()):
        dataset = pair.distribute_dataset(made, options)
        iterator = advanced(dataset, 3)
        state = iterator.get_state()
        assert "source" in state
        expected = [local(pair, x["x"]) for x in iterator]
        resumed = iter(dataset)
        resumed.set_state(state)
        assert [local(pair, x["x"]) for x in resumed] == expected and len(expected) == 7
    assert len(pair.distribute_dataset(data)) == 10
    assert len(pair.distribute_dataset(data.repeat())) > 2**62  # endless


def test_grain_loaders(pair, prefetch):
    grain = pytest.importorskip("grain", reason="grain is an optional dependency")
    loader = grain.DataLoader(
        data_source=grain.sources.RangeDataSource(0, 20, 1),
        sampler=grain.samplers.SequentialSampler(num_records=20),
        operations=[grain.transforms.Batch(4)],
        worker_count=0,
    )
    dataset = pair.distribute_dataset(loader, dj.InputOptions(prefetch=prefetch))
    iterator = advanced(dataset, 2)
    state = iterator.get_state()
    assert isinstance(state["source"], bytes)
    resumed = iter(dataset)
    resumed.set_state(state)
    assert rest(pair, resumed) == rest(pair, iterator) != []


# -- what cannot be resumed ------------------------------------------------------


def test_a_source_that_cannot_be_read_again(pair):
    source = iter(batches())
    iterator = iter(pair.distribute_dataset(source))
    iterator.set_state({"delivered": 2, "consumed": 2})  # nothing was read: this skips
    assert local(pair, next(iterator)) == [[20, 21], [22, 23]]
    with pytest.raises(ValueError, match="^set_state needs a dataset that can be iterated again"):
        iterator.set_state({"delivered": 0, "consumed": 0})


def test_a_source_that_is_too_short(pair):
    iterator = iter(pair.distribute_dataset(batches(3)))
    with pytest.raises(ValueError, match="(?s)at least 4 elements.*one that ended after 3"):
        iterator.set_state({"delivered": 4, "consumed": 4})


@pytest.mark.parametrize("state", [None, 3, {}, {"delivered": 1}, {"delivered": 1, "consumed": -1}])
def test_what_is_no_state(pair, state):
    iterator = iter(pair.distribute_dataset(batches(3)))
    with pytest.raises(ValueError, match="^set_state needs what get_state returned"):
        iterator.set_state(state)
    assert len(rest(pair, iterator)) == 3


PAIR = dj.VirtualStrategy(2)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([1, 2, 3, 4]), max_size=6),
    partial=st.sampled_from(["drop", "pad"]),
    from_function=st.booleans(),
    data=st.data(),
)
def test_law_saving_and_resuming_change_nothing(sizes, partial, from_function, data):
    """Elements up to a save, and those of the resumed iterator: as without saving."""
    made = [np.arange(n) + 10 * i for i, n in enumerate([4, *sizes])]
    options = dj.InputOptions(partial, data.draw(st.sampled_from([0, 2]), label="prefetch"))
    if from_function:
        dataset = PAIR.distribute_datasets_from_function(lambda ctx: made, options)
    else:
        dataset = PAIR.distribute_dataset(made, options)
    whole = rest_of(dataset)
    cut = data.draw(st.integers(0, len(whole)), label="cut")
    iterator = advanced(dataset, cut)
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert rest_of(resumed) == rest_of(iterator) == whole[cut:]


def rest_of(elements):
    data = [x.data if isinstance(x, dj.Batch) else x for x in elements]
    return [x.stacked.tolist() for x in data]
