"""Epochs: a dataset that is told which one it is, and one that has no second one."""

import itertools
import warnings

import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError

PAIR = dj.VirtualStrategy(2)
DEFAULT = dj.get_strategy()
STRATEGIES = pytest.mark.parametrize("s", [PAIR, DEFAULT], ids=["virtual2", "default"])


def firsts(s, elements):
    return [int(np.asarray(s.local_results(x)[0]).ravel()[0]) for x in elements]


class Shuffled:
    """Gives batches in an order that its epoch decides, when it is first read."""

    def __init__(self, count=8):
        self.count, self.epoch, self.told = count, None, []

    def set_epoch(self, epoch):
        self.told.append(epoch)
        self.epoch = epoch

    def __iter__(self):
        for i in np.random.default_rng(self.epoch).permutation(self.count):
            yield np.full(2, i)


def order(epoch, count=8):
    return np.random.default_rng(epoch).permutation(count).tolist()


# -- set_epoch -------------------------------------------------------------------


@STRATEGIES
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_dataset_is_told_its_epoch(s, prefetch):
    source = Shuffled()
    dataset = s.distribute_dataset(source, dj.InputOptions(prefetch=prefetch))
    for epoch in range(3):
        assert firsts(s, dataset) == order(epoch)
    assert source.told == [0, 1, 2]


def test_a_function_s_dataset_is_told_its_epoch():
    dataset = PAIR.distribute_datasets_from_function(lambda context: Shuffled())
    for epoch in range(2):
        assert firsts(PAIR, dataset) == order(epoch)[::2]


def test_two_iterators_have_an_epoch_each():
    """A generator function reads the epoch at its first element, maybe after another `iter`."""
    dataset = PAIR.distribute_dataset(Shuffled(), dj.InputOptions(prefetch=0))
    first, second = iter(dataset), iter(dataset)
    assert firsts(PAIR, first) == order(0)
    assert firsts(PAIR, second) == order(1)


@pytest.mark.parametrize("taken", [0, 1, 5, 8])
def test_a_position_has_the_epoch(taken):
    dataset = PAIR.distribute_dataset(Shuffled())
    for _ in range(3):
        list(dataset)
    iterator = iter(dataset)
    for _ in range(taken):
        next(iterator)
    state = iterator.get_state()
    assert state["epoch"] == 3
    later = PAIR.distribute_dataset(Shuffled())
    resumed = iter(later)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert firsts(PAIR, resumed) == order(3)[taken:]
    assert firsts(PAIR, later) == order(4)


def test_a_position_of_a_version_before_is_of_the_iterator_s_epoch():
    dataset = PAIR.distribute_dataset(Shuffled())
    list(dataset)
    iterator = iter(dataset)
    iterator.set_state({"delivered": 2, "consumed": 2, "full_size": 2})
    assert firsts(PAIR, iterator) == order(1)[2:]


@STRATEGIES
def test_an_epoch_that_the_user_tells_the_dataset(s):
    """As loops over streams do that begin again at an epoch, if `dataset.epoch` shows it."""
    dataset = s.distribute_dataset(source := Shuffled())
    for epoch in (3, 4, 7):
        source.set_epoch(epoch)
        assert firsts(s, dataset) == order(epoch)
    iterator = iter(dataset)  # nobody has told it
    assert iterator.get_state()["epoch"] == 8
    assert firsts(s, iterator) == order(8)


@pytest.mark.parametrize("shown", [None, -1, 2.0, True])
def test_an_attribute_that_is_no_epoch(shown):
    source = Shuffled()
    source.epoch = shown
    assert firsts(PAIR, PAIR.distribute_dataset(source)) == order(0)


# -- what cannot be iterated again -----------------------------------------------


def numbers():
    return [np.full(2, i) for i in range(5)]


class Once:
    """A reader that is its own iterator."""

    def __init__(self):
        self.left = numbers()

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return self.left.pop(0)


class Keeping:
    """Gives the same iterator whenever it is asked."""

    def __init__(self):
        self.iterator = iter(numbers())

    def __iter__(self):
        return self.iterator


ONE_SHOT = {
    "generator": lambda: (x for x in numbers()),
    "list iterator": lambda: iter(numbers()),
    "map": lambda: map(np.asarray, numbers()),
    "zip": lambda: zip(numbers(), numbers(), strict=True),
    "filter": lambda: filter(lambda x: x[0] >= 0, numbers()),
    "chain": lambda: itertools.chain(numbers()),
    "reader": Once,
    "kept": Keeping,
}


def short(s, dataset):
    return sum(1 for _ in dataset)


@STRATEGIES
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", ONE_SHOT)
def test_a_second_epoch_of_an_iterator_is_an_error(s, prefetch, kind):
    if s is DEFAULT and kind == "kept":
        pytest.skip("a plain loop over the user's own object")
    dataset = s.distribute_dataset(ONE_SHOT[kind](), dj.InputOptions(prefetch=prefetch))
    assert short(s, dataset) == 5
    for _ in range(2):
        with pytest.raises(BatchError) as error:
            short(s, dataset)
        text = str(error.value)
        assert text.startswith("a second epoch needs a dataset that can be iterated again.\n")
        assert "that has given all its elements" in text and "__iter__" in text


@pytest.mark.parametrize("kind", ["generator", "map", "list iterator", "reader"])
def test_an_iterator_that_was_read_by_another_dataset(kind):
    source = ONE_SHOT[kind]()
    assert short(PAIR, PAIR.distribute_dataset(source)) == 5
    with pytest.warns(UserWarning, match="that has none, or has given them before"):
        assert short(PAIR, PAIR.distribute_dataset(source)) == 0


class Reset(Once):
    """Its own iterator, which begins again when it is asked."""

    def __iter__(self):
        self.left = numbers()
        return self


class Persistent:
    """Keeps its iterator and resets it, as a torch loader does with persistent workers."""

    iterator = None

    def __iter__(self):
        if self.iterator is None:
            self.iterator = Reset()
        return iter(self.iterator)


@STRATEGIES
@pytest.mark.parametrize("make", [Reset, Persistent, numbers, lambda: [], Shuffled])
def test_what_can_be_iterated_again_is_silent(s, make):
    dataset = s.distribute_dataset(make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        counts = [short(s, dataset) for _ in range(3)]
    assert len(set(counts)) == 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_generator_goes_on_after_a_loop_that_was_left(prefetch):
    """What was read ahead is not lost, as it is not in a plain loop."""
    dataset = PAIR.distribute_dataset(ONE_SHOT["generator"](), dj.InputOptions(prefetch=prefetch))
    found = [firsts(PAIR, [x for _, x in zip(range(2), dataset, strict=False)]) for _ in range(2)]
    assert found == [[0, 1], [2, 3]]


# -- the default strategy --------------------------------------------------------


class Items:
    """Has a length, and items that never end."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.full(2, index)


@STRATEGIES
def test_items_without_an_index_error_end_at_the_length(s):
    dataset = s.distribute_dataset(Items())
    assert len(dataset) == 3
    for _ in range(2):
        assert firsts(s, itertools.islice(dataset, 9)) == [0, 1, 2]
