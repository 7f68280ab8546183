"""The stack of contexts belongs to a thread (decisions 19 and 26)."""

import threading

import jax.numpy as jnp
import pytest

import distjax as dj
from distjax._src.context import frames
from distjax.errors import ContextError
from tests.replicas import ids, local


def in_thread(fn):
    """Returns what ``fn`` returns, or raises what it raises, in a thread of its own."""
    box = {}

    def target():
        try:
            box["result"] = fn()
        except BaseException as error:
            box["error"] = error

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    if "error" in box:
        raise box["error"]
    return box["result"]


def test_new_thread_starts_in_the_default_context(pair):
    def ask():
        return dj.has_strategy(), dj.in_cross_replica_context(), dj.get_strategy()

    default = dj.get_strategy()
    with pair.scope():
        assert in_thread(ask) == (False, False, default)
    dj.set_strategy(pair)
    assert in_thread(ask) == (False, False, default)
    dj.set_strategy(None)
    assert pair.run(lambda: in_thread(lambda: dj.has_strategy())) is False


def test_set_strategy_in_a_thread_stays_there(pair):
    in_thread(lambda: dj.set_strategy(pair))
    assert not dj.has_strategy()


def test_scope_left_from_another_thread(pair):
    scope = pair.scope()
    scope.__enter__()
    with pytest.raises(ContextError, match=r"(?s)order opposite.*entered in another thread"):
        in_thread(lambda: scope.__exit__(None, None, None))
    assert dj.get_strategy() is pair
    scope.__exit__(None, None, None)
    assert not dj.has_strategy()


def test_threads_of_ours_are_handed_a_stack(pair):
    with pair.scope():
        stack = frames.stack()

    def ask():
        with frames.with_stack(stack):
            inside = dj.get_strategy()
        return inside, dj.has_strategy()

    assert in_thread(ask) == (pair, False)


def test_two_threads_run_two_strategies_at_once():
    """Both are in a replica function at the same moment, and neither sees the other."""
    strategies = [dj.VirtualStrategy(2), dj.VirtualStrategy(3)]
    meet = threading.Barrier(2, timeout=60)
    results, errors = {}, []

    def work(strategy):
        def fn(x):
            meet.wait()
            context = dj.get_replica_context()
            assert context.strategy is strategy is dj.get_strategy()
            total = context.merge_call(merge, args=(x,))
            return x + total

        def merge(s, x):
            assert s is strategy and dj.in_cross_replica_context()
            return s.reduce("sum", x)

        try:
            with strategy.scope():
                v = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)
            out = strategy.run(fn, args=(ids(strategy),))
            strategy.run(lambda: v.assign_add(jnp.float32(1)))
            results[strategy] = local(strategy, out), float(v.value)
        except BaseException as error:
            errors.append(error)
            meet.abort()

    threads = [threading.Thread(target=work, args=(s,)) for s in strategies]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert not errors
    assert results == {
        strategies[0]: ([1.0, 2.0], 2.0),
        strategies[1]: ([3.0, 4.0, 5.0], 3.0),
    }


def test_one_function_run_by_two_threads_is_compiled_right_in_both(pair):
    def fn(x):
        return dj.get_replica_context().all_reduce("sum", x) + x

    x = ids(pair)
    start = threading.Barrier(2, timeout=60)
    results, errors = [], []

    def work():
        try:
            start.wait()
            results.append(local(pair, pair.run(fn, args=(x,))))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert not errors
    assert results == [[1.0, 2.0]] * 2
