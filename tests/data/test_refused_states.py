"""What set_state refuses changes nothing: elements, position and source are as they were."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import distjax as dj

PAIR = dj.VirtualStrategy(2)
LENGTH = 6


def batches(length=LENGTH, size=4):
    return [np.full(size, i) for i in range(length)]


class Counting:
    """Its own iterator, with a state; refuses some states after moving."""

    def __init__(self, length=LENGTH):
        self.length, self.at = length, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        return np.full(4, self.at - 1)

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = 99
        self.at = state["at"]


class Again:
    """A new Counting for each iteration."""

    def __iter__(self):
        return Counting()


class Rewound:
    """Its own iterator, which begins again when it is asked for one."""

    def __iter__(self):
        self.at = 0
        return self

    def __next__(self):
        if self.at == LENGTH:
            raise StopIteration
        self.at += 1
        return np.full(4, self.at - 1)


class OneIterator:
    """Gives the same iterator whenever it is asked for one."""

    def __init__(self):
        self.iterator = iter(batches())

    def __iter__(self):
        return self.iterator


class ByItem:
    """A length and items without end, as slices of arrays give."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return np.full(4, index)


SOURCES = {
    "list": batches,
    "generator": lambda: (batch for batch in batches()),
    "counting": Counting,
    "again": Again,
    "rewound": Rewound,
    "one iterator": OneIterator,
    "by item": ByItem,
}
REFUSED = {
    "no state": {"epoch": 1},
    "too far": {"delivered": 9, "consumed": 9},
    "another element": {"delivered": 2, "consumed": 2, "checksum": 8},
    "no state of the source": {"delivered": 2, "consumed": 2, "source": {"to": 1}},
}
#: These are read before what is wrong can be seen.
NOT_SEEN = {
    (source, refused)
    for source in ("generator", "rewound", "counting")
    for refused in ("too far", "another element")
}


def value(element):
    return int(element.stacked[0, 0])


@settings(max_examples=150, deadline=None)
@given(
    source=st.sampled_from(sorted(SOURCES)),
    refused=st.lists(st.sampled_from(sorted(REFUSED)), min_size=1, max_size=2),
    taken=st.integers(0, LENGTH),
    prefetch=st.sampled_from([0, 1, 4]),
    by_take=st.booleans(),
)
def test_law_a_refused_state_changes_nothing(source, refused, taken, prefetch, by_take):
    options = dj.InputOptions(prefetch=prefetch)
    iterator = iter(PAIR.distribute_dataset(SOURCES[source](), options))
    if by_take and taken:
        iterator.take(taken)
    else:
        for _ in range(taken):
            next(iterator)
    before = iterator.get_state()
    for name in refused:
        if not taken and ((source, name) in NOT_SEEN or source == "one iterator"):
            continue
        if name == "no state of the source" and source not in ("counting", "again"):
            continue
        with pytest.raises((ValueError, KeyError)):
            iterator.set_state(REFUSED[name])
    assert iterator.get_state() == before
    assert [value(element) for element in iterator] == list(range(taken, LENGTH))


@pytest.mark.parametrize("source", ["generator", "rewound"])
@pytest.mark.parametrize("name", ["too far", "another element"])
def test_a_state_that_cannot_be_checked_at_once_is_refused_by_the_first_element(source, name):
    iterator = iter(PAIR.distribute_dataset(SOURCES[source]()))
    iterator.set_state(REFUSED[name])
    with pytest.raises(ValueError, match="^set_state needs a dataset"):
        next(iterator)


@pytest.mark.parametrize("source", sorted(SOURCES))
def test_the_last_state_set_before_the_first_element_counts(source):
    iterator = iter(PAIR.distribute_dataset(SOURCES[source]()))
    if source != "one iterator":
        iterator.set_state({"delivered": 1, "consumed": 1})
    iterator.set_state({"delivered": 3, "consumed": 3})
    assert iterator.get_state()["delivered"] == 3
    assert [value(element) for element in iterator] == [3, 4, 5]


# -- batches of another size -----------------------------------------------------


@pytest.mark.parametrize("partial", ["error", "drop", "pad"])
@pytest.mark.parametrize("size", [2, 8])
def test_a_position_in_batches_of_another_size(partial, size):
    """Two batches of 8 are four of 4: examples would come twice, or never."""
    examples = np.arange(32)
    cut = lambda size: [examples[i : i + size] for i in range(0, 32, size)]
    options = dj.InputOptions(partial)
    iterator = iter(PAIR.distribute_dataset(cut(4), options))
    next(iterator)
    four = dj.VirtualStrategy(size // 2)
    resumed = iter(four.distribute_dataset(cut(size), options))
    with pytest.raises(ValueError) as error:
        resumed.set_state(iterator.get_state())
    text = str(error.value)
    assert text.startswith("set_state needs a dataset that gives the same elements again")
    assert f"(now {size})" in text and "leave the iterator out" in text
    element = next(resumed)
    first = element.data if partial == "pad" else element
    assert np.asarray(getattr(first, "stacked", first)).ravel().tolist() == list(range(size))


class Batched(Counting):
    """Counting with batches of another size."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def __next__(self):
        return super().__next__()[:1].repeat(self.size)


def make_from_function(strategy, data, options):
    return strategy.distribute_datasets_from_function(lambda context: data, options)


@pytest.mark.parametrize("make", [dj.Strategy.distribute_dataset, make_from_function])
@pytest.mark.parametrize(("partial", "size"), [("drop", 2), ("drop", 8), ("pad", 8), ("error", 8)])
def test_batches_of_another_size_of_a_source_with_a_state(make, partial, size):
    options = dj.InputOptions(partial)
    iterator = iter(make(PAIR, Batched(4), options))
    next(iterator)
    with pytest.raises(ValueError, match=f"batches of another size .now {size}."):
        iter(make(PAIR, Batched(size), options)).set_state(iterator.get_state())


# -- other elements of a source with a state -------------------------------------


class Drawn(Counting):
    """Counting in an order that a seed decides, with another element in each place."""

    def __init__(self, seed=0):
        super().__init__()
        self.order = np.roll(np.random.default_rng(0).permutation(LENGTH), seed)

    def __next__(self):
        return self.order[super().__next__()]


class DrawnAgain:
    """A new Drawn for each iteration."""

    def __init__(self, seed=0):
        self.seed = seed

    def __iter__(self):
        return Drawn(self.seed)


@pytest.mark.parametrize("make", [dj.Strategy.distribute_dataset, make_from_function])
@pytest.mark.parametrize("source", [Drawn, DrawnAgain])
@pytest.mark.parametrize("taken", range(4))
def test_a_source_with_a_state_that_goes_on_elsewhere(make, source, taken):
    """The last element taken is read again, and compared; what is refused changes nothing."""
    options = dj.InputOptions("pad")
    iterator = iter(make(PAIR, source(), options))
    for _ in range(taken):
        next(iterator)
    state = iterator.get_state()
    left = [x.data.stacked.tolist() for x in iterator]
    other = iter(make(PAIR, source(seed=1), options))
    resumed = iter(make(PAIR, source(), options))
    for _ in range(2):
        if taken:
            before = other.get_state()
            with pytest.raises(ValueError) as error:
                other.set_state(state)
            text = str(error.value)
            assert text.startswith("set_state needs a dataset that gives the same elements again")
            assert "from its own state if it has one" in text and other.get_state() == before
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert [x.data.stacked.tolist() for x in resumed] == left
    whole = [x.data.stacked.tolist() for x in iter(make(PAIR, DrawnAgain(1), options))]
    assert [x.data.stacked.tolist() for x in other] == whole


# -- sources whose iteration has an effect ---------------------------------------


class Shuffled:
    """As a torch loader: each iteration draws its order from one generator."""

    def __init__(self):
        self.random = np.random.default_rng(3)

    def __iter__(self):
        order = self.random.permutation(24)
        return iter(order.reshape(LENGTH, 4))


def test_a_resumed_loader_has_the_order_it_would_have_had():
    whole = [x.stacked.tolist() for x in PAIR.distribute_dataset(Shuffled())]
    iterator = iter(PAIR.distribute_dataset(Shuffled()))
    next(iterator), next(iterator)
    resumed = iter(PAIR.distribute_dataset(Shuffled()))
    resumed.set_state(iterator.get_state())
    assert [x.stacked.tolist() for x in resumed] == whole[2:]


def test_items_without_an_end_end_with_the_length():
    dataset = PAIR.distribute_dataset(ByItem())
    assert [value(element) for element in dataset] == list(range(LENGTH)) and len(dataset) == LENGTH
