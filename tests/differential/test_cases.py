"""Hand-written programs: compiled result = reference result = closed form."""

import contextlib

import cases
import numpy as np
import pytest
from outcomes import assert_same, compiled_strategies, outcome

import distjax as dj
from distjax.replica.analysis import blind

REPLICA_COUNTS = (1, 2, 3, 8)
#: Which strategies, and whether inside `dj.jit`; in full for two replicas (compiling is slow).
SHORT_MATRIX = [("virtual", ""), ("mirrored", ", in dj.jit")]
MATRIX = [*SHORT_MATRIX, ("virtual", ", in dj.jit"), ("mirrored", "")]


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
    strategies = compiled_strategies(num_replicas)
    for name, how in MATRIX if num_replicas == 2 else SHORT_MATRIX:
        found = outcome(strategies[name], make, dj.jit if how else lambda fn: fn)
        assert_same(found, reference, f"{name}{how}")


def test_proving_less_never_changes_a_value(make):
    strategy = dj.VirtualStrategy(2)
    seeing = outcome(strategy, make)
    assert seeing[0], "a case returns something to compare"
    with contextlib.suppress(dj.errors.LocalityError):  # a proof may be needed to accept it
        with blind():
            unproved = outcome(strategy, make)
        assert_same(unproved, seeing, "nothing proved")
