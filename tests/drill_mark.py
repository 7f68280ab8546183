"""Tests that take long for what they add to the quick ones beside them: the marker ``drill``.

A plugin of pytest, which `tests/conftest.py` names. Drills are left out of a run, unless it asks
for them: `make drill-test` does, by ``-m drill``. One that is named on the command line runs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def all_drills_but(quick: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values of a parameter; a test with another one than the quick ones is a drill.

    A tuple is a value of each of several parameters.
    """
    quick = list(quick)
    each = lambda value: value if isinstance(value, tuple) else (value,)
    return [v if v in quick else pytest.param(*each(v), marks=pytest.mark.drill) for v in values]


def first_of_each(key: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """Returns the values of a parameter: a drill is one whose key another one before it has."""
    firsts = {}
    values = list(values)
    for value in values:
        firsts.setdefault(key(value), value)
    return all_drills_but(firsts.values(), values)


def pytest_collection_modifyitems(config, items):
    """Leaves out drills, where they are not asked for."""
    if "drill" in config.option.markexpr or any("::" in arg for arg in config.args):
        return
    drills = [item for item in items if item.get_closest_marker("drill")]
    if drills:
        config.hook.pytest_deselected(items=drills)
        items[:] = [item for item in items if not item.get_closest_marker("drill")]
