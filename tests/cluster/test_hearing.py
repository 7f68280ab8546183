"""What one process of a job cannot do is an error on all of them."""

import pytest

from distjax._src.cluster.meeting import failure_of, hear_all, hear_first, require_no_failure
from distjax.errors import CheckpointError
from tests.cluster.test_ending import make_job


def fail(error):
    raise error


def test_one_process_alone_does_it_and_raises_its_own_error():
    assert hear_all(None, "a look", lambda: 3) == [3]
    assert hear_first(None, "a look", lambda: 3) == 3
    with pytest.raises(OSError, match="^full$"):
        hear_all(None, "a look", lambda: fail(OSError("full")))


def test_an_error_of_distjax_is_raised_by_the_others_as_it_is():
    failure = failure_of(CheckpointError("the checkpoint needs a disk.\n  Got: none"))
    with pytest.raises(CheckpointError, match="^the checkpoint needs a disk.\n  Got: none$"):
        require_no_failure(make_job(), [None, failure])


def test_any_other_error_says_whose_it_was():
    with pytest.raises(RuntimeError, match=r"^process 0 on a .* failed: OSError: x{50}.*\.\.\.$"):
        require_no_failure(make_job(), [failure_of(OSError("x" * 1000)), None])


def test_nothing_is_raised_where_none_has_failed():
    require_no_failure(make_job(), [None, None])
