"""`strategy.scope()` is one object: entered again, in itself, and from several threads."""

import contextvars
import subprocess
import sys
import threading

import pytest

import distjax as dj
from distjax._src.context import frames
from distjax.errors import ContextError, StrategyMismatchError
from tests.context.test_threads import in_thread

LEFT_BEFORE = r"(?s)order opposite.*Got: a scope that was left before, or entered in another thread"


def test_entering_gives_the_strategy_each_time(pair):
    scope = pair.scope()
    for _ in range(2):
        with scope as entered:
            assert entered is pair is dj.get_strategy()
        assert not dj.has_strategy()


def test_it_nests_in_itself(pair):
    scope = pair.scope()
    with scope, scope as inner:
        assert inner is pair and len(frames.stack()) == 2
        with scope:
            assert len(frames.stack()) == 3
        assert len(frames.stack()) == 2
    assert frames.stack() == ()


def test_two_threads_are_in_it_at_once(pair):
    scope, meet = pair.scope(), threading.Barrier(2, timeout=60)
    found = []

    def enter():
        with scope:
            meet.wait()
            found.append(dj.get_strategy())
            meet.wait()
        found.append(dj.has_strategy())

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == [pair, pair, False, False]


def test_left_twice(pair):
    scope = pair.scope()
    with scope:
        pass
    with pytest.raises(ContextError, match=LEFT_BEFORE):
        scope.__exit__(None, None, None)
    assert frames.stack() == ()


def test_left_before_it_was_entered(pair):
    with pytest.raises(ContextError, match=LEFT_BEFORE):
        pair.scope().__exit__(None, None, None)
    assert frames.stack() == ()


def test_entered_again_after_an_error_in_it(pair):
    scope = pair.scope()
    with pytest.raises(KeyError), scope:
        raise KeyError
    with scope:
        assert dj.Variable(0.0).strategy is pair
    assert frames.stack() == ()


def test_left_in_another_thread(pair):
    scope = pair.scope()
    with scope:
        with pytest.raises(ContextError, match=LEFT_BEFORE):
            in_thread(lambda: scope.__exit__(None, None, None))
        assert dj.get_strategy() is pair
    assert not dj.has_strategy()


def test_left_out_of_order_it_is_left_all_the_same(pair):
    outer, inner = pair.scope(), pair.scope()
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ContextError, match=r"(?s)order opposite.*Got: innermost is cross-replica"):
        outer.__exit__(None, None, None)
    assert len(frames.stack()) == 1
    inner.__exit__(None, None, None)
    assert frames.stack() == ()


def test_an_error_under_way_counts_more_than_the_order(pair):
    outer, inner = pair.scope(), pair.scope()
    with pytest.raises(ZeroDivisionError), outer:
        inner.__enter__()
        raise ZeroDivisionError
    inner.__exit__(None, None, None)
    assert frames.stack() == ()


def test_a_scope_that_cannot_be_entered_is_not(pair):
    scope = dj.VirtualStrategy(2).scope()
    with pair.scope(), pytest.raises(StrategyMismatchError, match=r"scope\(\) of"):
        scope.__enter__()
    with scope:
        pass
    assert frames.stack() == ()


def test_a_scope_decorates_a_function(pair):
    @pair.scope()
    def which(depth):
        return [dj.get_strategy(), *(which(depth - 1) if depth else ())]

    assert which(1) == [pair, pair]
    assert not dj.has_strategy()


def test_a_scope_that_nobody_can_leave_is_left(pair):
    pair.scope().__enter__()
    assert not dj.has_strategy()


def test_the_program_may_end_in_a_scope():
    """As a notebook does that entered it by hand; its frame is gone with the modules."""
    code = "import distjax as dj; scope = dj.VirtualStrategy(2).scope(); scope.__enter__()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_task_that_began_in_a_scope_stays_in_it(pair):
    with pair.scope():
        task = contextvars.copy_context()
    assert task.run(dj.get_strategy) is pair
    assert not dj.has_strategy()


def test_the_default_scope_is_entered_again_too():
    scope = dj.get_strategy().scope()
    with scope, scope as entered:
        assert entered is dj.get_strategy() and not dj.has_strategy()
        assert dj.get_replica_context().replica_id_in_sync_group == 0
    assert frames.stack() == ()
