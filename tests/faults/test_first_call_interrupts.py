"""An interrupt in a call that compiles: each variable has its value of before or after."""

import jax.numpy as jnp
import numpy as np

import distjax as dj
from tests.interrupts import campaign, in_packages

BOTH, OURS = in_packages("jax", "distjax"), in_packages("distjax")
STRIDE = 31  # 1 for a campaign: each line costs a call that traces and compiles


def variables_of(strategy):
    with strategy.scope():
        return [
            dj.Variable(jnp.zeros(4), name=f"v{i}", aggregation=dj.VariableAggregation.MEAN)
            for i in range(2)
        ]


def adding_to(variables):
    def add(x):
        for v in variables:
            v.assign_add(jnp.ones(4) * x[0])

    return add


def donating_step(strategy, variables):
    """Returns a step that donates its argument: once that is deleted, the program has run."""
    add = adding_to(variables)

    def step(x):
        strategy.run(add, args=(jnp.ones(2),))
        return x + 1

    return dj.jit(step, donate_argnums=0)


def whole(old, new):
    """Returns a check: all variables have the value `old`, or all have `new`."""

    def check(variables, outcome):
        assert isinstance(outcome.error, KeyboardInterrupt | None), outcome
        held = [np.asarray(v.value).tolist() for v in variables]
        assert held in ([[old] * 4] * 2, [[new] * 4] * 2), held

    return check


class Donated:
    """Cases of which the last one made has an argument that the program takes.

    Attributes:
      x: the argument of the call to be interrupted.
    """

    def __init__(self, strategy, called_before=False):
        self._strategy, self._called_before = strategy, called_before
        self.x = None

    def make(self):
        variables = variables_of(self._strategy)
        step = donating_step(self._strategy, variables)
        if self._called_before:
            step(jnp.zeros(2))
        self.x = jnp.zeros(3)
        return variables, lambda: step(self.x)

    def is_executed(self):
        return self.x.is_deleted()


def test_each_line_after_the_execution_of_a_first_call(pair):
    cases = Donated(pair)
    options = dict(after=cases.is_executed, stride=STRIDE, limit=500)
    campaign(cases.make, whole(0, 1), BOTH, **options)


def test_each_line_after_the_execution_of_a_call_with_a_new_shape(mirrored):
    cases = Donated(mirrored, called_before=True)
    options = dict(after=cases.is_executed, stride=STRIDE, limit=500)
    campaign(cases.make, whole(1, 2), BOTH, **options)


def test_each_moment_of_distjax_after_the_execution_of_a_first_call(pair):
    cases = Donated(pair)
    options = dict(after=cases.is_executed, after_calls=OURS, stride=11, limit=500)
    campaign(cases.make, whole(0, 1), OURS, **options)
