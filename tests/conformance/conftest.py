"""Rows of the table that span processes: the law is called there, and its result taken here."""

import pytest

from tests.processes import groups
from tests.processes.laws import HOW, ROWS, call_law, values_of


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Calls a law on each process of a group, if its strategy is a row that spans processes."""
    spec = getattr(pyfuncitem, "callspec", None)
    row = spec.params.get("strategy") if spec is not None else None
    if row not in ROWS:
        return None
    places = {
        argument: _place_of(pyfuncitem, argument)
        for argument in spec.params
        if argument != "strategy"
    }
    group = groups.group(*ROWS[row])
    group.call(call_law, pyfuncitem.module.__name__, pyfuncitem.originalname, places)
    return True


def _place_of(pyfuncitem, argument):
    given = pyfuncitem.callspec.params[argument]
    if argument == "how":
        return list(HOW).index(given)
    return next(i for i, x in enumerate(values_of(pyfuncitem.obj, argument)) if x is given)
