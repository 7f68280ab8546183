"""A merge function sees what its names stood for when merge_call was called."""

import functools
import types

import jax
import numpy as np
import pytest

import distjax as dj
from distjax._src.replica.merge import with_own_cells
from tests.replicas import ids, local


def merge(fn, *args):
    return dj.get_replica_context().merge_call(fn, args=args)


def test_merge_functions_over_the_variables_of_a_loop(pair, how):
    with pair.scope():
        variables = [dj.Variable(10.0, name=f"v{i}") for i in range(3)]

    def step(x):
        for factor, v in enumerate(variables, start=1):

            def apply(strategy, gradient):
                total = strategy.extended.reduce_to("sum", gradient, v)  # noqa: B023
                strategy.extended.update(v, lambda v, g: v.assign_sub(g), args=(total,))  # noqa: B023

            merge(apply, factor * x)

    how(lambda x: pair.run(step, args=(x,)))(ids(pair))
    assert [float(v.value) for v in variables] == [9.0, 8.0, 7.0]


def scaled(strategy, x, by):
    return strategy.reduce("sum", x) * by()


#: From a function that closes over a name to a merge function.
FORMS = {
    "lambda": lambda by: lambda strategy, x: strategy.reduce("sum", x) * by(),
    "partial of a lambda": lambda by: functools.partial(lambda s, x, n: scaled(s, x, by) * n, n=1),
    "function in a function": lambda by: lambda s, x: (lambda: scaled(s, x, by))(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_name_that_goes_on(pair, how, form):
    def step(x):
        results = []
        for factor in (1.0, 10.0, 100.0):
            results.append(merge(FORMS[form](lambda: factor), x))  # noqa: B023
        return results

    results = how(lambda x: pair.run(step, args=(x,)))(ids(pair))
    np.testing.assert_array_equal(jax.tree.map(float, results), [1.0, 10.0, 100.0])


def test_in_a_loop_and_under_a_gradient(pair):
    def step(x):
        total = 0.0
        for power in (2, 3):
            merged = lambda x: merge(lambda strategy, x: strategy.reduce("sum", x**power), x)  # noqa: B023
            total += jax.lax.fori_loop(0, 2, lambda i, t: t + merged(x), 0.0)  # noqa: B023
        return total

    assert float(pair.run(step, args=(2.0,))) == 2 * 2 * (4 + 8)
    gradient = pair.run(jax.grad(step), args=(2.0,))
    assert local(pair, gradient) == [2 * 2 * (4 + 12)] * 2


def test_names_without_a_value_and_names_that_functions_share():
    count = 0

    def add():
        nonlocal count
        count += 1
        return add if count < 3 else read()

    def read():
        return count, later

    own = functools.partial(with_own_cells(add, {}))
    count, later = 5, "now"
    with pytest.raises(NameError):
        own()()()
    assert (count, later) == (5, "now")
    assert with_own_cells(len, {}) is len


def test_methods_and_keywords():
    class Holder:
        def __init__(self, by):
            self.scaled = types.MethodType(lambda self, x, *, n=2: x * n * by, self)

    holder = Holder(3)
    scaled = with_own_cells(holder.scaled, {})
    assert scaled(1) == 6 and scaled.__self__ is holder and scaled.__name__ == "<lambda>"
