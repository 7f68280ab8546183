"""Which values of a parameter are drills, and that tests without the marker are not left out."""

import types

import pytest

from tests import drill_mark


def are_drills(values):
    return [getattr(value, "marks", ()) != () for value in values]


def test_all_but_the_quick_ones():
    values = drill_mark.all_drills_but(["b"], ["a", "b", "c"])
    assert are_drills(values) == [True, False, True]
    assert values[0] == pytest.param("a", marks=pytest.mark.drill)
    assert drill_mark.all_drills_but([], [("a", 1)]) == [
        pytest.param("a", 1, marks=pytest.mark.drill)
    ]


def test_all_but_the_first_of_each():
    values = drill_mark.first_of_each(lambda x: x % 3, [3, 4, 6, 5, 7])
    assert are_drills(values) == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("markexpr", "args", "left"),
    [("", ["tests"], ["quick"]), ("drill", ["tests"], None), ("", ["tests/test_a.py::b"], None)],
    ids=["a run", "a drill", "named"],
)
def test_what_is_left_out(markexpr, args, left):
    deselected = []
    config = types.SimpleNamespace(
        option=types.SimpleNamespace(markexpr=markexpr),
        args=args,
        hook=types.SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)),
    )
    marked = lambda name: types.SimpleNamespace(
        name=name, get_closest_marker=lambda marker: name if name == marker else None
    )
    items = [marked("quick"), marked("drill")]
    drill_mark.pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == (left or ["quick", "drill"])
    assert [item.name for item in deselected] == ([] if left is None else ["drill"])
