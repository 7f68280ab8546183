"""`scope = strategy.scope()` is one object: each entry puts in force, and leaves, its own frame."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import pytest

import distjax as dj
from distjax.errors import ContextError
from tests.faults.four_parts import is_explained
from tests.own_threads import in_own_thread, on_own_thread


@on_own_thread
def test_a_scope_can_be_entered_again(strategy):
    before = dj.get_strategy()
    scope = strategy.scope()
    for _ in range(3):
        with scope:
            assert dj.get_strategy() is strategy
        assert dj.get_strategy() is before


@on_own_thread
def test_a_scope_can_be_nested_in_itself(strategy):
    before = dj.get_strategy()
    scope = strategy.scope()
    with scope:
        with scope:
            assert dj.get_strategy() is strategy
        assert dj.get_strategy() is strategy
        assert dj.Variable(0.0).strategy is strategy
    assert dj.get_strategy() is before


@on_own_thread
def test_a_scope_can_be_entered_again_after_an_error_in_it(pair):
    scope = pair.scope()
    with pytest.raises(KeyError), scope:
        raise KeyError
    with scope:
        assert dj.get_strategy() is pair
    assert not dj.has_strategy()


@on_own_thread
def test_two_threads_enter_one_scope_and_each_leaves_its_own_frame(pair):
    scope, other = pair.scope(), dj.VirtualStrategy(3)
    meet = threading.Barrier(2, timeout=60)

    def leave():
        with entered_by_both(scope, meet):
            pass
        has_left = not dj.has_strategy()
        with other.scope():
            return has_left, dj.get_strategy() is other

    def stay(leaving):
        with entered_by_both(scope, meet):
            has_left = leaving.result(60)
            found = dj.get_strategy() is pair, dj.Variable(jnp.zeros(2)).strategy is pair
        return *has_left, *found, not dj.has_strategy()

    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(stay, pool.submit(leave)).result(60) == (True,) * 5


@contextlib.contextmanager
def entered_by_both(scope, meet):
    """Enters the scope, and waits until the other thread has, too."""
    try:
        scope.__enter__()
    except BaseException:
        meet.abort()  # the other thread need not wait
        raise
    meet.wait()
    try:
        yield
    finally:
        scope.__exit__(None, None, None)


@on_own_thread
def test_a_scope_left_in_another_thread_raises_and_its_own_thread_can_still_leave(pair):
    scope = pair.scope()
    scope.__enter__()
    try:
        with pytest.raises(ContextError):
            in_own_thread(lambda: scope.__exit__(None, None, None))
        assert dj.get_strategy() is pair
    finally:
        scope.__exit__(None, None, None)
    assert not dj.has_strategy()


@on_own_thread
def test_a_scope_left_twice_is_an_error(pair):
    scope = pair.scope()
    with scope:
        pass
    with pytest.raises(ContextError) as caught:
        scope.__exit__(None, None, None)
    assert is_explained(caught.value)
    assert not dj.has_strategy()


@on_own_thread
def test_a_scope_left_before_it_was_entered_is_an_error(pair):
    with pytest.raises(ContextError):
        pair.scope().__exit__(None, None, None)
