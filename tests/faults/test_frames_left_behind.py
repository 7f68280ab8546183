"""After an interrupt around a change of context the thread can go on in its own."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.interrupts import campaign, in_codes, in_packages, interrupted

OURS = in_packages("distjax")


def context():
    """Returns what says in which context the caller is."""
    return dj.get_strategy(), dj.get_replica_context(), dj.in_cross_replica_context()


def codes_that_change_the_context(call):
    """Returns the functions that run when the context of `call` changes."""
    seen, before, found = [None], [context()], set()

    def look(frame):
        now = context()
        if now != before[0]:
            found.update(code for code in (seen[0], frame.f_code) if code is not None)
        seen[0], before[0] = frame.f_code, now

    interrupted(call, math.inf, OURS, look=look)
    assert found, "the context never changed"
    return frozenset(found)


def first_call(strategy, v):
    def step(x):
        v.assign_add(x)

    return lambda: strategy.run(step, args=(jnp.ones(3),))


def update(strategy, v):
    return lambda: strategy.extended.update(v, lambda v: v.assign_add(jnp.ones(3)))


def scope(strategy, v):
    def enter():
        with strategy.scope():
            v.assign_add(jnp.ones(3))

    return enter


def require_clean(strategy, v, _):
    """Asserts that this thread can do all it could, in the default context and in another."""
    other = dj.VirtualStrategy(4)
    assert not dj.has_strategy() and not dj.in_cross_replica_context()
    with other.scope():
        assert dj.get_strategy() is other
        dj.Variable(jnp.zeros(3))
    before = np.asarray(v.value)
    assert before.tolist() in ([0] * 3, [1] * 3)
    strategy.run(lambda x: (v.assign_add(x), None)[1], args=(jnp.ones(3),))
    np.testing.assert_array_equal(v.value, before + 1)


@pytest.mark.parametrize("make_call", [first_call, update, scope], ids=lambda fn: fn.__name__)
def test_each_line_of_what_changes_the_context(pair, make_call):
    def make():
        with pair.scope():
            v = dj.Variable(jnp.zeros(3), aggregation=dj.VariableAggregation.MEAN)
        return v, make_call(pair, v)

    changing = in_codes(codes_that_change_the_context(make()[1]))
    campaign(make, functools.partial(require_clean, pair), changing, limit=500)
