"""The marker ``pairwise`` leaves every pair of values of any two parameters."""

import itertools
import types

import pytest

from tests.pairwise import covering, pytest_collection_modifyitems

PARAMETERS = {
    "three of two": {"a": "xy", "b": "xy", "c": "xy"},
    "of different lengths": {"a": range(16), "b": range(4), "c": "xy", "d": "xy"},
    "two of one length": {"a": "xy", "b": "xy"},
    "one": {"a": range(3)},
    "two": {"a": range(3), "b": range(5)},
}


def product(parameters):
    return [
        dict(zip(parameters, row, strict=True)) for row in itertools.product(*parameters.values())
    ]


@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS)
def test_each_pair_is_there(parameters):
    cases = product(parameters)
    chosen = [cases[i] for i in covering(cases)]
    for a, b in itertools.combinations_with_replacement(parameters, 2):
        assert {(x[a], x[b]) for x in chosen} == {(x[a], x[b]) for x in cases}


def test_there_are_as_few_as_the_two_longest_need():
    cases = product(PARAMETERS["of different lengths"])
    assert len(covering(cases)) == 16 * 4


class Item:
    """What the hook sees of a test."""

    parent = "a module"

    def __init__(self, name, params, is_marked):
        self.originalname, self._is_marked = name, is_marked
        self.callspec = types.SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return self._is_marked and name == "pairwise"


def test_only_cases_of_a_marked_test_are_left_out():
    cases = product(PARAMETERS["three of two"])
    marked, other = ([Item(name, x, name == "a") for x in cases] for name in "ab")
    items = [*marked, *other]
    pytest_collection_modifyitems(items)
    assert [item.originalname for item in items] == ["a"] * 4 + ["b"] * 8
    named = [marked[5]]
    pytest_collection_modifyitems(named)
    assert named == [marked[5]]
