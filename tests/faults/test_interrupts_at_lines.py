"""The tool of this folder interrupts where it says, and nowhere else."""

import math
import sys
import threading

import pytest

from tests.interrupts import Interrupt, campaign, in_codes, in_packages, interrupted
from tests.own_threads import in_own_thread

LOCK = threading.Lock()


def three_lines(passed):
    passed.append(1)
    passed.append(2)
    passed.append(3)


def locked(passed):
    with LOCK:
        passed.append(1)


def returns_locked(passed):
    with LOCK:
        return len(passed)


def store_of_a_call(passed):
    number = len(passed)
    return number


HERE = in_packages(__name__)


@pytest.mark.parametrize("n, passed_before", [(1, []), (2, [1]), (3, [1, 2])])
def test_the_nth_line_is_not_run(n, passed_before):
    passed = []
    outcome = interrupted(lambda: three_lines(passed), n, in_codes({three_lines.__code__}))
    assert isinstance(outcome.error, Interrupt)
    assert outcome.error.__traceback__ is None
    assert passed == passed_before
    first = three_lines.__code__.co_firstlineno
    assert outcome.line == f"{__name__}:{first + n} (three_lines)"


def test_a_call_that_ends_before_its_line_is_as_without():
    before = sys.gettrace()
    outcome = interrupted(lambda: len("abc"), math.inf, in_packages("elsewhere"))
    assert (outcome.line, outcome.error, outcome.result, outcome.num_lines) == (None, None, 3, 0)
    assert sys.gettrace() is before


@pytest.mark.parametrize("fn", [locked, returns_locked])
def test_no_interrupt_leaves_a_lock_locked(fn):
    def check(*_):
        assert not LOCK.locked()

    campaign(lambda: (None, lambda: fn([])), check, HERE, after_calls=HERE, limit=30)


def test_the_end_of_a_call_counts_if_asked_for():
    lines = interrupted(lambda: store_of_a_call([]), math.inf, in_codes({store_of_a_call.__code__}))
    codes = in_codes({store_of_a_call.__code__})
    moments = interrupted(lambda: store_of_a_call([]), math.inf, codes, after_calls=codes)
    assert (lines.num_lines, moments.num_lines) == (2, 3)


def test_lines_count_once_a_condition_holds():
    passed = []
    options = dict(after=lambda: len(passed) == 2)
    outcome = interrupted(lambda: three_lines(passed), 1, HERE, **options)
    assert passed == [1, 2] and outcome.num_lines == 1


def test_a_campaign_names_the_lines_that_broke_something():
    def make():
        passed = []
        return passed, lambda: three_lines(passed)

    def check(passed, _):
        assert len(passed) != 1, "broken"

    with pytest.raises(AssertionError) as caught:
        campaign(make, check, in_codes({three_lines.__code__}), limit=10)
    assert str(caught.value).count("(three_lines): AssertionError: broken") == 1


def test_a_campaign_that_counts_nothing_is_an_error():
    make = lambda: (None, lambda: None)
    with pytest.raises(AssertionError, match="no line was counted"):
        campaign(make, lambda *_: None, in_packages("elsewhere"), limit=10)
    campaign(make, lambda *_: None, in_packages("elsewhere"), limit=10, may_be_none=True)


def test_a_campaign_that_would_be_long_is_an_error():
    make = lambda: (None, lambda: three_lines([]))
    with pytest.raises(AssertionError, match="more than 2 lines"):
        campaign(make, lambda *_: None, in_codes({three_lines.__code__}), limit=2)


def test_a_thread_of_its_own_returns_raises_and_is_not_awaited_for_ever():
    assert in_own_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        in_own_thread(lambda: 1 / 0)
    go_on = threading.Event()
    with pytest.raises(AssertionError, match="a thread hangs for"):
        in_own_thread(go_on.wait, seconds=0)
    go_on.set()
