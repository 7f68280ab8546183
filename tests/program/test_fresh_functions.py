"""The warning about a function that is made anew, and so compiled, for each call."""

import functools
import warnings

import jax
import pytest

import distjax as dj
from distjax.errors import RecompilationWarning


def multiplied(x, factor):
    return x * factor


REMADE = {
    "lambda": lambda s: s.run(lambda x: x, args=(1.0,)),
    "partial": lambda s: s.run(functools.partial(multiplied, factor=2), args=(1.0,)),
    "jax.jit": lambda s: s.run(jax.jit(multiplied), args=(1.0, 2.0)),
    "dj.jit": lambda s: dj.jit(multiplied)(1.0, 2.0),
}


def warnings_of(calls):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in calls:
            call()
    return caught


@pytest.mark.parametrize("kind", list(REMADE))
def test_a_function_made_anew_for_each_call(kind):
    strategy = dj.VirtualStrategy(2)
    (warning,) = warnings_of([lambda: REMADE[kind](strategy)] * 8)
    assert warning.category is RecompilationWarning and warning.filename == __file__
    name = "<lambda>.<locals>.<lambda>" if kind == "lambda" else "multiplied"
    assert str(warning.message).splitlines() == [
        f"{name} needs to be one function object for all its calls.",
        "  Got: 8 function objects of the same code, each called once.",
        "  Why: a compiled program is found by the function object, so that a new lambda, "
        "functools.partial or jit is compiled at each call.",
        "  Fix: make it once, before the loop: fn = functools.partial(...); strategy.run(fn, ...)",
    ]


def test_functions_made_anew_and_called_again_do_not_warn():
    """A function for each setting of a search, each called several times."""
    strategy = dj.VirtualStrategy(2)

    def train(factor):
        step = functools.partial(multiplied, factor=factor)
        strategy.run(step, args=(1.0,))
        strategy.run(step, args=(1.0,))

    assert warnings_of([functools.partial(train, i) for i in range(9)]) == []


def test_a_function_for_each_strategy_does_not_warn():
    strategies = [dj.VirtualStrategy(2) for _ in range(9)]
    assert warnings_of([lambda s=s: s.run(lambda: 1) for s in strategies]) == []


class Trainer:
    def step(self, x):
        return x


def test_a_method_of_many_objects_does_not_warn():
    strategy = dj.VirtualStrategy(2)
    trainers = [Trainer() for _ in range(9)]
    assert warnings_of([lambda t=t: strategy.run(t.step, args=(1.0,)) for t in trainers]) == []


def test_a_function_that_is_explained_and_checked_is_one_function(pair):
    """As in a test of each configuration of a step."""

    def step(x):
        return x.sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in range(1, 6):
            dj.check(step, jax.numpy.ones(size), strategy=pair)
            dj.explain(step, jax.numpy.ones(size), strategy=pair)
