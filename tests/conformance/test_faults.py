"""Laws of what goes wrong: nothing half done, nothing left active, nothing mixed up."""

import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.strategies.default import DEFAULT_STRATEGY
from distjax.errors import StrategyMismatchError
from tests.replicas import counted, everywhere, ids, local

SYNC, AGG = dj.VariableSynchronization, dj.VariableAggregation


def state():
    """Returns what the free functions say: strategy, has one, cross-replica, is a replica."""
    return (
        dj.get_strategy(),
        dj.has_strategy(),
        dj.in_cross_replica_context(),
        dj.get_replica_context() is not None,
    )


DEFAULT = (DEFAULT_STRATEGY, False, False, True)


def make(strategy, start, **options):
    with strategy.scope():
        return dj.Variable(start, aggregation=AGG.SUM, **options)


def held(variables):
    return [np.stack(v.local_results()).tolist() for v in variables]


def merge(fn, *args):
    return dj.get_replica_context().merge_call(fn, args=args)


# -- exceptions -----------------------------------------------------------------


class Boom(Exception):
    """Raised in the middle of a user's function."""


def writes_then_fails(variables, fails):
    """Returns a replica function that writes each variable, and then may raise."""

    def fn(x):
        for v in variables:
            v.assign_add(x * jnp.ones(v.shape))
        if fails:
            raise Boom
        return x

    return fn


def in_run(strategy, variables, fails):
    return lambda x: strategy.run(writes_then_fails(variables, fails), args=(x,))


def in_merge(strategy, variables, fails):
    def merged(strategy, x):
        writes_then_fails(variables[:1], fails)(jnp.float32(1))
        return x

    return lambda x: strategy.run(lambda x: merge(merged, x), args=(x,))


def after_a_merge(strategy, variables, fails):
    def fn(x):
        merge(lambda s, x: s.reduce("sum", x), x)
        return writes_then_fails(variables, fails)(x)

    return lambda x: strategy.run(fn, args=(x,))


def in_update(strategy, variables, fails):
    def fn(v):
        v.assign_add(jnp.ones(v.shape))
        if fails:
            raise Boom

    return lambda x: [strategy.extended.update(v, fn) for v in variables] and None


@pytest.mark.pairwise
@pytest.mark.parametrize("where", [in_run, in_merge, after_a_merge, in_update])
def test_an_exception_changes_nothing(strategy, how, where):
    """It leaves with its type, contexts and variables are as before, and the next call works."""
    on_read = make(strategy, 0.0, synchronization=SYNC.ON_READ)
    variables = [make(strategy, jnp.zeros(24)), on_read]
    before, x = held(variables), strategy.run(lambda x: x + 1, args=(ids(strategy),))
    with pytest.raises(Boom):
        how(where(strategy, variables, True))(x)
    assert state() == DEFAULT
    is_python = strategy is DEFAULT_STRATEGY and how is not dj.jit and where is not in_update
    assert (held(variables) == before) != is_python  # its `run` calls the function as it is
    before = held(variables)
    how(where(strategy, variables, False))(x)
    assert state() == DEFAULT
    assert held(variables)[0] != before[0]


def test_an_exception_in_a_scope_leaves_it(strategy):
    with pytest.raises(Boom), strategy.scope():
        assert dj.get_strategy() is strategy
        raise Boom
    assert state() == DEFAULT


# -- contexts, threads, other strategies ----------------------------------------


def test_every_context_question_has_an_answer(strategy, how):
    """In run one is a replica, in a merge one is not, afterwards all is as before."""
    seen = []

    def merged(s, x):
        seen.append((s is strategy, dj.get_strategy() is strategy, dj.in_cross_replica_context()))
        return x

    def fn(x):
        context = dj.get_replica_context()
        assert not dj.in_cross_replica_context()
        assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
        return context.merge_call(merged, args=(x,))

    how(lambda x: strategy.run(fn, args=(x,)))(jnp.float32(1))
    assert set(seen) == {(True, True, True)}
    assert state() == DEFAULT


def test_a_jitted_function_in_several_contexts(strategy):
    @dj.jit
    def where():
        return dj.get_strategy().num_replicas_in_sync, dj.in_cross_replica_context()

    for _ in range(2):
        assert where() == (1, False)
        with strategy.scope():
            inside = where()
        if strategy is not DEFAULT_STRATEGY:
            assert inside == (strategy.num_replicas_in_sync, True)
        assert where() == (1, False)


def test_a_second_thread(strategy):
    """Decision 19: it starts in the default context, and runs the same programs as the first."""
    total, seen = make(strategy, jnp.zeros(24)), []

    def fn(x):
        total.assign_add(x * jnp.ones(24))
        return dj.get_replica_context().all_reduce("sum", x)

    step = lambda: strategy.run(fn, args=(ids(strategy),))

    def work():
        seen.append(state())
        seen.append(step())

    with strategy.scope():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert seen[0] == DEFAULT
    n = strategy.num_replicas_in_sync
    for reduced in (seen[1], step()):
        assert local(strategy, reduced) == everywhere(strategy, n * (n - 1) / 2)
    np.testing.assert_array_equal(total.value, np.full(24, n * (n - 1)))


def test_a_second_strategy_of_the_same_shape(strategy, make_another):
    """Values of the same replicas are shared; variables and programs are each strategy's own."""
    if strategy is DEFAULT_STRATEGY:
        assert dj.get_strategy() is strategy  # there is one, and it is always the same
        return
    other = make_another()
    theirs = make(other, jnp.zeros(24), name="theirs")

    def fn(x):
        return merge(lambda s, x: (s is strategy, s.reduce("sum", x)), x)

    x, n = ids(other), strategy.num_replicas_in_sync
    for s, is_first in ((strategy, True), (other, False), (strategy, True)):
        assert s.run(fn, args=(x,))[0] is is_first
        assert float(s.run(fn, args=(x,))[1]) == n * (n - 1) / 2
    for action, use in {
        "read": lambda: theirs.value,
        "write": lambda: theirs.assign(jnp.ones(24)),
    }.items():
        with pytest.raises(StrategyMismatchError, match=f"^a {action} of variable 'theirs'"):
            strategy.run(use)
    np.testing.assert_array_equal(theirs.value, np.zeros(24))
    with pytest.raises(StrategyMismatchError), strategy.scope(), other.scope():
        pass
    assert state() == DEFAULT


def test_strategies_are_not_copied(strategy):
    for duplicate in (copy.copy, copy.deepcopy):
        with pytest.raises(RuntimeError, match="needs to stay one object"):
            duplicate(strategy)


# -- programs are compiled once -------------------------------------------------


def test_traced_once_per_signature(strategy, how):
    v = make(strategy, jnp.zeros(24))

    @counted
    def fn(x, y):
        v.assign_add(jnp.zeros(24))
        return dj.get_replica_context().all_reduce("sum", x), y

    if strategy is DEFAULT_STRATEGY and how is not dj.jit:
        return  # it runs functions as they are, at every call
    step = how(lambda x, y: strategy.run(fn, args=(x, y)))
    for args in [
        (jnp.ones(2), 1),
        (jnp.ones(2), 2),  # a number is an input, not part of the program
        (jnp.ones(3), 1),
        (jnp.ones(3), 1.0),
        ({"a": jnp.ones(2)}, 1),
        (jnp.zeros(2), 7),
    ]:
        step(*args)
    assert fn.calls == 4


def test_repeated_calls_trace_nothing(strategy, how):
    """A step with reads, writes, a merge and results that go in again: one trace for all calls."""
    w = make(strategy, jnp.zeros(24))
    count = make(strategy, 0.0, synchronization=SYNC.ON_READ)

    @counted
    def fn(x, last):
        count.assign_add(jnp.float32(1))
        merge(lambda s, x: s.extended.update(w, lambda w, x: w.assign_add(x) is None, (x,)), last)
        return x, dj.get_replica_context().all_reduce("sum", last * 0 + w.value)

    step = how(lambda x, last: strategy.run(fn, args=(x, last)))
    start = lambda x: (x, jnp.ones(24))  # laid out as results are: jit asks where arguments live
    x, last = step(*strategy.run(start, args=(ids(strategy),)))
    seen = fn.calls
    for _ in range(3):
        x, last = step(x, last)
    jax.block_until_ready(last)
    assert fn.calls == (seen + 3 if strategy is DEFAULT_STRATEGY and how is not dj.jit else seen)
    assert local(strategy, x) == list(range(strategy.num_replicas_in_sync))
    assert local(strategy, count) == everywhere(strategy, 4.0)
