"""A step that exchanges what it captures would do so in its trace only: it is refused."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import TraceLeakError


class Held:
    """A user's object with two of a kind."""

    def __init__(self, one, two):
        self.one, self.two, self.last = one, two, None

    def swap(self):
        self.one, self.two = self.two, self.one

    def rotate(self):
        self.last.append(self.last.pop(0))

    def remember(self):
        self.last = self.one


def _variable(number):
    return dj.Variable(float(number), aggregation=dj.VariableAggregation.MEAN)


KINDS = {
    "variable": _variable,
    "metric": lambda number: dj.metrics.Mean(f"mean{number}"),
    "layer": lambda number: dj.layers.BatchNormalization(1, name=f"norm{number}"),
    "array": lambda number: jnp.full(2, float(number)),
    "numpy": lambda number: np.full(2, float(number)),
    "holder": lambda number: types.SimpleNamespace(v=_variable(number)),
    "object": lambda number: Held(_variable(number), _variable(number)),
}
MODES = {
    "run": lambda strategy, fn: lambda: strategy.run(fn),
    "dj.jit": lambda strategy, fn: dj.jit(lambda: strategy.run(fn)),
    "strategy.jit": lambda strategy, fn: strategy.jit(fn),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["swap", "rotate"])
def test_an_exchange_is_refused(how, kind, mode):
    strategy = dj.VirtualStrategy(2)
    with strategy.scope():
        held = Held(KINDS[kind](1), KINDS[kind](2))
        held.last = [KINDS[kind](3), KINDS[kind](4)]
    with pytest.raises(TraceLeakError, match="needs to leave what it captures in its place"):
        MODES[mode](strategy, getattr(held, how))()


def test_what_is_put_back_is_in_its_place():
    held = Held(_variable(1), _variable(2))

    @dj.jit
    def borrow():
        one = held.one
        del held.one
        one.assign_add(1.0)
        held.one = one

    borrow()
    borrow()
    assert float(held.one.value) == 3


def test_what_a_loop_goes_on_to_is_no_loss(pair):
    with pair.scope():
        variables = [_variable(1), _variable(2)]

    @dj.jit
    def step():
        for v in variables:
            pair.run(lambda: v.assign_add(1.0))  # noqa: B023

    step()
    step()
    assert [float(v.value) for v in variables] == [3, 4]


def test_the_text():
    held = Held(_variable(1), _variable(2))
    with pytest.raises(TraceLeakError) as caught:
        dj.jit(held.swap)()
    assert str(caught.value) == (
        "Held.swap needs to leave what it captures in its place.\n"
        "  Got: in self.one what was in self.two before.\n"
        "  Why: the Python code of a compiled step does not run again: they would be swapped "
        "while it is traced, and at no later call.\n"
        "  Fix: exchange them between two calls of Held.swap; or exchange the values of variables: "
        "a, b = v.value, w.value; v.assign(b); w.assign(a)"
    )


def test_the_fix():
    v, w = _variable(1), _variable(2)

    @dj.jit
    def swap():
        a, b = v.value, w.value
        v.assign(b)
        w.assign(a)

    swap()
    assert (float(v.value), float(w.value)) == (2, 1)
    swap()
    assert (float(v.value), float(w.value)) == (1, 2)


def test_a_second_place_and_numbers_are_no_exchange():
    held = Held(_variable(1), _variable(2))
    dj.jit(held.remember)()
    assert held.last is held.one
    dj.jit(Held(1, 2).swap)()
