"""Hand-written programs: compiled result = reference result = closed form."""

import cases
import numpy as np
import pytest
from outcomes import assert_same, compiled_strategies, outcome, per_replica_leaves

import distjax as dj

REPLICA_COUNTS = (1, 2, 3, 8)


@pytest.fixture(params=list(cases.CASES))
def make(request):
    """One maker of cases after the other."""
    return cases.CASES[request.param]


@pytest.mark.parametrize("num_replicas", REPLICA_COUNTS)
def test_compiled_equals_reference_equals_closed_form(make, num_replicas):
    strategy = dj.testing.ReferenceStrategy(num_replicas)
    reference = outcome(strategy, make)
    expected = make(strategy).expected
    if expected is not None:
        for found, wanted in zip(reference[0], expected(num_replicas), strict=True):
            np.testing.assert_allclose(np.stack(found), np.asarray(wanted), rtol=1e-5)
    for name, compiled in compiled_strategies(num_replicas).items():
        assert_same(outcome(compiled, make), reference, name)
        assert_same(outcome(compiled, make, dj.jit), reference, f"{name}, in dj.jit")


def test_every_case_returns_something_to_compare(make):
    strategy = dj.VirtualStrategy(2)
    case = make(strategy)
    assert per_replica_leaves(strategy, case.step(*case.args))
