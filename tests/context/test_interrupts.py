"""An interrupt at any line that changes the context leaves the thread in its own.

A trace function raises at the n-th line that the functions of the two files pass: once for
each n, until a call ends before its line.
"""

import itertools
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax._src.context import frames

FILES = {frames.__file__, frames.__file__}


class Interrupt(KeyboardInterrupt):
    """Raised by the trace function alone."""


def is_interrupted(call, number):
    """Calls ``call()``, interrupted at that line; returns whether it came so far."""
    passed = itertools.count(1)

    def trace(frame, event, _):
        code = frame.f_code
        if (
            code.co_filename not in FILES or code.co_name == "__del__"
        ):  # Python drops what it raises
            return None
        if event == "line" and next(passed) == number:
            raise Interrupt
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(former)
    return False


def run(strategy, v):
    strategy.run(lambda x: v.assign_add(x), args=(jnp.ones(3),))


def merge_call(strategy, v):
    def merge(strategy, x):
        v.assign_add(strategy.reduce("mean", x))

    strategy.run(
        lambda x: dj.get_replica_context().merge_call(merge, args=(x,)), args=(jnp.ones(3),)
    )


def update(strategy, v):
    strategy.extended.update(v, lambda v: v.assign_add(jnp.ones(3)))


def scope(strategy, v):
    with strategy.scope():
        v.assign_add(jnp.ones(3))


def colocate(strategy, v):
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        v.assign_add(jnp.ones(3))


def default_run(strategy, v):
    def merge(default, x):
        v.assign_add(x)

    dj.get_strategy().run(
        lambda x: dj.get_replica_context().merge_call(merge, args=(x,)), args=(jnp.ones(3),)
    )


def hand_over(strategy, v):
    with frames.with_stack((frames.Frame(strategy),)):
        v.assign_add(jnp.ones(3))


def make_variable(strategy):
    with strategy.scope():
        return dj.Variable(jnp.zeros(3), aggregation=dj.VariableAggregation.MEAN)


def require_clean(strategy, v):
    """Asserts that the thread is in no context, and can do what it could."""
    assert frames.stack() == ()
    with dj.VirtualStrategy(3).scope():
        dj.Variable(jnp.zeros(3))
    before = np.asarray(v.value)
    assert before.tolist() in ([0] * 3, [1] * 3)
    for operation in (update, scope):
        operation(strategy, v)
    np.testing.assert_array_equal(v.value, before + 2)


OPERATIONS = [run, merge_call, update, scope, colocate, hand_over]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda fn: fn.__name__)
def test_each_line(operation):
    strategy = dj.VirtualStrategy(2)
    for number in itertools.count(1):
        v = make_variable(strategy)
        was_interrupted = is_interrupted(lambda v=v: operation(strategy, v), number)
        require_clean(strategy, v)
        if not was_interrupted:
            break
    assert number > 10
    merge_call(strategy, v)


def test_each_line_of_the_default_strategys_run():
    v = dj.Variable(jnp.zeros(3))
    for number in itertools.count(1):
        v.assign(jnp.zeros(3))
        was_interrupted = is_interrupted(lambda: default_run(None, v), number)
        assert frames.stack() == ()
        assert np.asarray(v.value).tolist() in ([0] * 3, [1] * 3)
        if not was_interrupted:
            break
    assert number > 10


def test_a_call_that_a_signal_kept_from_leaving():
    """Once it is collected its frame is gone, and not what was entered since."""
    strategy = dj.VirtualStrategy(2)
    abandoned = frames.with_frame(frames.Frame(strategy))
    abandoned.__enter__()
    with strategy.scope():
        del abandoned
        (frame,) = frames.stack()
        assert frame.strategy is dj.get_strategy() is strategy
    assert frames.stack() == ()
