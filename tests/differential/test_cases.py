"""Hand-written programs: compiled result = reference result = closed form."""

import numpy as np
import pytest

import distjax as dj
from tests.differential import (
    cases,
    variable_cases,  # noqa: F401 - adds its cases to the table
)
from tests.differential.outcomes import assert_same, compiled_strategies, outcome, unproved_outcome
from tests.drill_mark import all_drills_but

#: Cases that are refused where nothing is proved: they write mirrored variables in replicas or
#: in merge functions, or compute with a merge argument.
NEED_PROOFS = (
    "branches_with_equal_predicates",
    "counters_of_ints",
    "merge_results",
    "values_read_before_a_write",
    "variables_made_in_a_replica",
    "writes_in_dj_loops",
    "writes_of_mirrored_variables",
)
#: For each number of replicas which strategies, and whether inside `dj.jit` (compiling is slow).
MATRIX = {
    1: [("mirrored", "")],
    2: [("virtual", ""), ("mirrored", ", in dj.jit")],
    3: [("virtual", ", in dj.jit")],
}


@pytest.fixture(params=list(cases.CASES))
def make(request):
    """One maker of cases after the other."""
    return cases.CASES[request.param]


@pytest.mark.parametrize("num_replicas", all_drills_but([2, 3], MATRIX))
def test_compiled_equals_reference_equals_closed_form(make, num_replicas):
    strategy = dj.testing.ReferenceStrategy(num_replicas)
    reference = outcome(strategy, make)
    expected = make(strategy).expected
    if expected is not None:
        for found, wanted in zip(reference[0], expected(num_replicas), strict=True):
            np.testing.assert_allclose(np.stack(found), np.asarray(wanted), rtol=1e-5)
    strategies = compiled_strategies(num_replicas)
    for name, how in MATRIX[num_replicas]:
        found = outcome(strategies[name], make, dj.jit if how else lambda fn: fn)
        assert_same(found, reference, f"{name}{how}")


def test_proving_less_never_changes_a_value(make):
    strategy = dj.VirtualStrategy(2)
    seeing = outcome(strategy, make)
    assert seeing[0], "a case returns something to compare"
    unproved = unproved_outcome(strategy, make)
    assert (unproved is None) == (make.__name__ in NEED_PROOFS)
    if unproved is not None:
        assert_same(unproved, seeing, "nothing proved")
