"""Cases that hold each pair of values of any two parameters, instead of each combination.

A plugin of pytest: `tests/conftest.py` takes the hook at the end. Of a test with the marker
``pairwise``, whose parameters do not act on one another, it leaves fewer cases: a law that two
values break together is still seen to be broken, one that only three break together may not be.
A case that is named on the command line runs, whichever it is.
"""

import itertools

import pytest


def pairs(case):
    """Returns the pairs of values of a case (its value, where it has one only), as a set.

    Args:
      case: parameter -> value; a value is one object in all cases.
    """
    values = [(name, id(case[name])) for name in sorted(case)]
    return {*itertools.combinations(values, min(2, len(values)))}


def covering(cases):
    """Returns the indices of cases that hold every pair which is in any of the cases.

    It takes a case with the most pairs that are not there yet, and of those the first.
    """
    pairs_of, chosen = [pairs(case) for case in cases], []
    missing = set().union(*pairs_of)
    while missing:
        best = max(range(len(cases)), key=lambda i: len(pairs_of[i] & missing))
        missing -= pairs_of[best]
        chosen.append(best)
    return sorted(chosen)


@pytest.hookimpl(trylast=True)  # -k has chosen
def pytest_collection_modifyitems(items):
    """Leaves cases of each test with the marker that hold all pairs."""
    cases = {}
    for item in items:
        if item.get_closest_marker("pairwise"):
            cases.setdefault((item.parent, item.originalname), []).append(item)
    left_out = set()
    for group in cases.values():
        kept = covering([item.callspec.params for item in group])
        left_out.update(item for i, item in enumerate(group) if i not in kept)
    items[:] = [item for item in items if item not in left_out]
