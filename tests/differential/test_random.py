"""Random programs: compiled and reference agree, and proving less changes no number."""

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import distjax as dj
from tests.differential import programs
from tests.differential.outcomes import assert_same, compiled_strategies, outcome, unproved_outcome

# Registers go in equal and come out different on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::distjax.errors.LocalityWarning")

# Fixed examples: a failure is a bug, not the luck of the day. To look further, raise
# max_examples and drop derandomize.
MODEST = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
REPLICA_COUNTS = st.sampled_from([2, 3])
HOWS = st.sampled_from([dj.jit, lambda fn: fn])
ROUNDING = {"rtol": 1e-4, "atol": 1e-3}


@settings(MODEST, max_examples=10)
@given(programs.programs(), st.integers(0, 1), REPLICA_COUNTS, HOWS)
def test_compiled_equals_reference(program, flag, num_replicas, how):
    make = programs.maker(program, flag)
    reference = outcome(dj.testing.ReferenceStrategy(num_replicas), make)
    for name, strategy in compiled_strategies(num_replicas).items():
        assert_same(outcome(strategy, make, how), reference, name, **ROUNDING)


@settings(MODEST, max_examples=10)
@given(programs.programs(), st.integers(0, 1), REPLICA_COUNTS)
def test_proving_more_never_changes_a_value(program, flag, num_replicas):
    make = programs.maker(program, flag)
    seeing = outcome(dj.VirtualStrategy(num_replicas), make)
    unproved = unproved_outcome(dj.VirtualStrategy(num_replicas), make)
    event("refused" if unproved is None else "accepted")
    if unproved is not None:
        assert_same(unproved, seeing, "nothing proved", **ROUNDING)
