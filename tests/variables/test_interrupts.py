"""Ctrl-C in the middle of a step: each variable has its value of before or after."""

import random
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import ContextError
from tests.replicas import ids

MEAN = dj.VariableAggregation.MEAN
LOST = (
    "variable 'w' needs a value.\n"
    "  Got: none: a program that writes it failed, or was interrupted, as it started.\n"
    "  Why: such a program reuses the memory of the former value, and returned no new one.\n"
    "  Fix: checkpointer.restore(tree), or v.assign(...), for each variable that the step writes"
)


def make(strategy, name):
    with strategy.scope():
        return dj.Variable(jnp.zeros(8), name=name, aggregation=MEAN)


class Alarm(BaseException):
    """Raised by a program, as an error of its callback is."""


@pytest.fixture
def call_until_interrupt():
    """``call_until_interrupt(fn, seconds)`` calls ``fn`` again and again until Ctrl-C.

    Python drops what is raised while it calls a destructor, or JAX's callback for the garbage
    collector: such a signal stops nothing, and the calls end after the one that it fell into.
    """
    rung = []

    def ring(*_):
        rung.append(True)
        signal.raise_signal(signal.SIGINT)

    # A function: Python 3.13 handles signals at the end of a loop outside its `with`.
    def repeat(fn):
        while not rung:
            fn()

    def call(fn, seconds):
        rung.clear()
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            repeat(fn)
        except KeyboardInterrupt:
            pass
        except Exception as error:
            if "KeyboardInterrupt" not in str(error):  # JAX has put it into a text of its own
                raise

    before = signal.signal(signal.SIGALRM, ring)
    yield call
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_interrupts_at_any_moment_lose_no_value(pair, call_until_interrupt):
    variables = [make(pair, f"w{i}") for i in range(12)]

    def fn(x):
        for v in variables:
            v.assign_add(jnp.full(8, x))

    step = lambda: pair.run(fn, args=(ids(pair),))
    for _ in range(3):
        step()
    chance, least = random.Random(0), 0.0
    for _ in range(25):
        call_until_interrupt(step, chance.uniform(0.0001, 0.004))
        (held,) = {tuple(np.asarray(v.value)) for v in variables}  # all written, or none
        assert held[0] >= least
        least = held[0]
        assert not dj.has_strategy()


@pytest.fixture
def lost(pair, monkeypatch):
    """A variable whose program ran and was interrupted before it returned, and its step."""
    w = make(pair, "w")
    compile_it = jax.jit

    def interrupted(*args, **kwargs):
        program = compile_it(*args, **kwargs)
        if "donate_argnums" not in kwargs:  # not that of the step
            return program

        def call(*args):
            program(*args)
            raise Alarm

        call.trace = program.trace
        return call

    step = lambda: pair.run(lambda x: (w.assign_add(jnp.full(8, x)), None)[1], args=(ids(pair),))
    with monkeypatch.context() as patch, pytest.raises(Alarm):
        patch.setattr(jax, "jit", interrupted)
        step()
    return w, lambda: pair.run(lambda x: (w.assign_add(jnp.full(8, x)), None)[1], args=(ids(pair),))


def test_a_value_that_is_lost_is_an_error_that_says_so(lost):
    w, step = lost
    add = lambda: w.assign_add(jnp.ones(8))
    for use in (lambda: w.value, w.local_results, add, step):
        with pytest.raises(ContextError) as caught:
            use()
        assert str(caught.value) == LOST


@pytest.mark.parametrize("is_warm", [False, True])
def test_what_lost_a_value_is_the_cause_of_the_error(is_warm):
    """On one CPU device a program runs where it is launched, which then raises its error."""
    strategy = dj.VirtualStrategy(2)
    w = make(strategy, "w")

    def fail(x):
        if x > 1:
            raise ValueError("mine")
        return x

    def step(x):
        w.assign_add(jnp.ones(8))
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), np.float32), x)

    if is_warm:
        strategy.run(step, args=(0.0,))
    with pytest.raises(ContextError) as caught:
        strategy.run(step, args=(2.0,))
    assert str(caught.value) == LOST
    assert "ValueError: mine" in str(caught.value.__cause__)
    with pytest.raises(ContextError) as later:
        strategy.run(step, args=(0.0,))
    assert str(later.value) == LOST and later.value.__cause__ is None


def test_a_lost_value_can_be_assigned(lost):
    w, step = lost
    w.assign(jnp.ones(8))
    step()
    np.testing.assert_array_equal(w.value, np.full(8, 1.5))


def test_a_lost_value_can_be_restored(lost, tmp_path):
    w, step = lost
    with dj.checkpoint.Checkpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, {"w": jnp.ones(8)})
        checkpointer.restore({"w": w})
    step()
    np.testing.assert_array_equal(w.value, np.full(8, 1.5))
