"""A training of a job is killed, and ends as if nothing had been: `make drills` does it often."""

import pytest

from tests.drills.kills import ALONE, drill

pytestmark = [pytest.mark.multiprocess, pytest.mark.drill]


def test_a_training_that_is_killed_ends_as_one_that_is_not(tmp_path):
    *_, last = drill(4, tmp_path, [(2, 2), ALONE], is_wide=True)
    assert last.result == "to 1e-12"
