"""distribute_datasets_from_function: consecutive elements go to consecutive replicas."""

import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError
from tests.replicas import local

DROP, PAD = dj.InputOptions("drop"), dj.InputOptions("pad")
DEFAULT = dj.get_strategy()


def distributed(strategy, made, options=None):
    return strategy.distribute_datasets_from_function(lambda ctx: made, options)


def elements(strategy, made, options=None):
    return [local(strategy, x) for x in distributed(strategy, made, options)]


@pytest.mark.api_row("experimental_distribute_datasets_from_function")
def test_the_function_is_called_once_with_its_context(strategy):
    contexts = []

    def fn(context):
        contexts.append(context)
        return [np.arange(2)] * strategy.num_replicas_in_sync

    dataset = strategy.distribute_datasets_from_function(fn)
    assert [len(list(dataset)) for _ in range(2)] == [1, 1]
    assert contexts == [dj.InputContext(1, 0, strategy.num_replicas_in_sync)]


def test_r029_the_default_strategy_returns_what_the_function_does():
    made = [np.array([0, 1])]
    assert distributed(DEFAULT, made) is made
    assert next(iter(DEFAULT.distribute_datasets_from_function(lambda ctx: made))).tolist() == [
        0,
        1,
    ]
    (batch,) = distributed(DEFAULT, made, PAD)
    assert batch.mask.tolist() == [True, True]


def test_elements_of_any_rank(strategy):
    r = strategy.num_replicas_in_sync
    for shape in [(), (2,), (2, 3)]:
        made = [np.full(shape, i, np.float32) for i in range(2 * r)]
        assert elements(strategy, made) == [
            [x.tolist() for x in made[:r]],
            [x.tolist() for x in made[r:]],
        ]


def test_leaves_need_no_common_dimension(pair):
    made = [{"image": np.zeros((3, 3)), "label": i} for i in range(4)]
    out = list(distributed(pair, made))
    assert [local(pair, x["label"]) for x in out] == [[0, 1], [2, 3]]


# -- steps with missing or smaller elements ------------------------------------


def test_error_for_missing_elements(pair):
    dataset = distributed(pair, iter(np.arange(3)))
    iterator = iter(dataset)
    assert local(pair, next(iterator)) == [0, 1]
    with pytest.raises(BatchError, match="^a step needs 2 elements, one per replica") as e:
        next(iterator)
    assert "Got: 1 in the last step (elements 2 to 2)" in str(e.value)
    assert "partial='pad'" in str(e.value) and "partial='drop'" in str(e.value)


def test_error_for_missing_elements_before_the_first_where_the_length_tells(pair):
    with pytest.raises(BatchError, match=r"(?s)^a step needs 2.*1 in the last step \(of 3 el"):
        distributed(pair, [np.float32(i) for i in range(3)])


def test_drop(pair):
    assert elements(pair, np.arange(5), DROP) == [[0, 1], [2, 3]]
    sizes = (2, 2, 2, 1, 2, 2, 2)
    made = [np.full(n, i) for i, n in enumerate(sizes)]
    assert elements(pair, made, DROP) == [[[0, 0], [1, 1]], [[4, 4], [5, 5]]]


def test_pad_of_smaller_and_missing_elements(pair):
    made = [np.array([0, 1]), np.array([2, 3]), np.array([4])]
    first, last = distributed(pair, made, PAD)
    assert local(pair, first.data) == [[0, 1], [2, 3]]
    assert local(pair, first.mask) == [[True, True], [True, True]]
    assert local(pair, last.data) == [[4, 4], [4, 4]]
    assert local(pair, last.mask) == [[True, False], [False, False]]


@pytest.mark.parametrize("is_tuple", [False, True])
def test_pad_of_elements_without_a_common_dimension(pair, is_tuple):
    """The mask is one bool per replica, and weighs scalars as well."""
    made = [(np.zeros(2), np.float32(i)) if is_tuple else np.float32(i) for i in range(3)]
    first, last = distributed(pair, made, PAD)
    value = last.data[1] if is_tuple else last.data
    assert local(pair, first.mask) == [True, True]
    assert local(pair, last.mask) == [True, False]
    assert local(pair, value) == [2.0, 2.0]
    assert float(pair.reduce("sum", value, mask=last.mask)) == 2.0
    assert float(pair.reduce("mean", value, mask=last.mask)) == 2.0


def test_length(pair):
    def length(made, options=None):
        return len(distributed(pair, made, options))

    assert length(np.arange(4)) == 2
    assert length(np.arange(5), DROP) == 2
    assert length(np.arange(5), PAD) == 3
    assert length([np.zeros(n) for n in (2, 2, 2, 1)], DROP) == 1
    assert length([np.zeros(n) for n in (2, 1, 2, 2, 2)], DROP) == 1
    sized = np.zeros((6, 2))  # items are told by the first and the last
    assert length(sized, DROP) == 3
    with pytest.raises(TypeError, match="has no len"):
        length(iter([]))


def test_length_of_a_dataset_that_tells_first_and_last(pair):
    class Sized:
        def __init__(self, *sizes):
            self.sizes = sizes

        def __len__(self):
            return len(self.sizes)

        def __getitem__(self, i):
            return np.zeros(self.sizes[i])

    assert len(distributed(pair, Sized(2, 2, 2, 1), DROP)) == 1
    assert len(distributed(pair, Sized(2, 2, 2, 2), DROP)) == 2
    assert len(distributed(pair, Sized(2, 2, 2, 2, 1), DROP)) == 2


# -- what cannot be stacked ----------------------------------------------------


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**70])
def test_a_python_int_that_jax_cannot_hold(pair, number):
    """It would wrap around; the same as a value of `distribute_values_from_function`."""
    with pytest.raises(BatchError) as e:
        list(distributed(pair, [{"id": 1}, {"id": number}]))
    expected = "integers that int32 holds as leaf ['id']"
    if number == 2**70:  # NumPy has no integer for it either
        expected = "arrays of numbers, leaf ['id'] is not an array"
    assert str(e.value).startswith(f"element 1 needs {expected}.\n")
    assert elements(pair, [2**31 - 1, -(2**31)]) == [[2**31 - 1, -(2**31)]]


@pytest.mark.parametrize(
    ("other", "got"),
    [
        (np.zeros((1, 3)), r"leaf \['x'\]: float64\[1, 3\] on replica 1, float64\[2, 3\] on 0"),
        (np.zeros((2, 3), np.int32), "int32.* on replica 1, float64"),
    ],
    ids=["shape", "dtype"],
)
def test_elements_of_one_step_that_differ(pair, other, got):
    with pytest.raises(BatchError, match="^the elements of one step .from element 2 on.") as e:
        list(distributed(pair, [{"x": np.zeros((2, 3))}] * 3 + [{"x": other}]))
    e.match(got)


def test_structures_that_differ(pair):
    with pytest.raises(BatchError, match="(?s)need one structure and one shape.*the structures"):
        list(distributed(pair, [{"x": np.zeros(2)}, {"y": np.zeros(2)}]))


@pytest.mark.parametrize("options", [DROP, PAD])
@pytest.mark.parametrize("other", [np.zeros(3), np.float32(0)], ids=["larger", "scalar"])
def test_elements_that_cannot_be_filled_up(pair, options, other):
    with pytest.raises(BatchError, match="^element 3 needs a leading dimension of at most 2") as e:
        list(distributed(pair, [np.zeros(2)] * 3 + [other], options))
    assert "the first element sets the full size" in str(e.value)


def test_a_function_that_returns_no_dataset(pair):
    with pytest.raises(TypeError, match="^distribute_datasets_from_function needs a function"):
        distributed(pair, None)


def test_text_elements(pair):
    with pytest.raises(BatchError, match="^element 1 needs arrays of numbers"):
        list(distributed(pair, [np.zeros(1), np.array("text")]))
