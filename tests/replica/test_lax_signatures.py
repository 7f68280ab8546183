"""dj.lax takes what jax.lax takes (decision 5)."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import local

ON_READ = {
    "synchronization": dj.VariableSynchronization.ON_READ,
    "aggregation": dj.VariableAggregation.SUM,
}


@pytest.mark.parametrize("name", ["scan", "fori_loop", "while_loop", "cond", "switch"])
def test_parameters_are_those_of_jax(name):
    public = lambda fn: [p for p in inspect.signature(fn).parameters if not p.startswith("_")]
    assert public(getattr(dj.lax, name)) == public(getattr(jax.lax, name))


@pytest.mark.parametrize("in_run", [True, False])
def test_operand_and_unroll(pair, in_run):
    with pair.scope():
        v = dj.Variable(0.0, **ON_READ)

    def step(x):
        add = lambda y: v.assign_add(y) if in_run else y
        dj.lax.cond(True, add, lambda y: y * 0, operand=x)
        dj.lax.switch(1, [lambda y: y, add], operand=x)
        return dj.lax.fori_loop(0, 4, lambda i, y: y + i, x, unroll=2)

    run = (lambda x: pair.run(step, args=(x,))) if in_run else step
    assert float(run(jnp.float32(2))) == 8.0
    assert float(v.value) == (8.0 if in_run else 0.0)


def test_operand_beside_operands():
    same = lambda *x: x
    with pytest.raises(TypeError, match="^cond needs its operands by position, or one as operand="):
        dj.lax.cond(True, same, same, 1, operand=2)
    with pytest.raises(TypeError, match="^switch needs its operands by position, or one as opera"):
        dj.lax.switch(0, [same], 1, operand=2)


#: Each calls ``body`` with what it was given as a number, or as a numpy array.
GIVEN = {
    "scan": lambda lax, x, body: lax.scan(lambda c, _: (body(c), None), x, None, length=2)[0],
    "scan xs": lambda lax, x, body: lax.scan(lambda c, x: (c, body(x)), 0, np.stack([x, x]))[1],
    "while_loop": lambda lax, x, body: lax.while_loop(
        lambda c: c[0].astype(jnp.float32) < 2, lambda c: (c[0] + 1, body(c[1])), (0, x)
    ),
    "fori_loop": lambda lax, x, body: lax.fori_loop(0, 2, lambda i, c: body(c) * i.size, x),
    "cond": lambda lax, x, body: lax.cond(True, body, lambda x: 2 * x, x),
    "switch": lambda lax, x, body: lax.switch(1, [lambda x: 2 * x, body], x),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("x", [2, 2.5, np.arange(2.0)], ids=str)
@pytest.mark.parametrize("where", ["run", "jit", "eager"])
def test_bodies_get_arrays_of_jax_for_numbers_and_numpy_arrays(pair, where, x, name):
    def step(lax):
        return GIVEN[name](lax, x, lambda x: x.at[...].add(1).astype(x.dtype))

    call = {
        "run": lambda fn: pair.run(fn),
        "jit": lambda fn: dj.jit(fn)(),
        "eager": lambda fn: fn(),
    }
    found, expected = (call[where](lambda lax=lax: step(lax)) for lax in (dj.lax, jax.lax))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    dtypes = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert dtypes(found) == dtypes(expected)


@pytest.mark.parametrize("name", [name for name in GIVEN if name != "scan xs"])
def test_a_number_that_a_body_gets_is_an_array_which_sums(pair, name):
    """Decision 10 refuses a Python number of the body's own, not one that JAX makes an array."""
    with pair.scope():
        v = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def write(x):
        v.assign_add(x)
        return x

    pair.run(lambda: GIVEN[name](dj.lax, 3.0, write))
    assert local(pair, v) == [6 if name in ("cond", "switch") else 12] * 2


def test_an_index_that_a_body_gets_is_an_array_which_sums(pair):
    with pair.scope():
        v = dj.Variable(0, aggregation=dj.VariableAggregation.SUM)
    pair.run(lambda: dj.lax.fori_loop(1, 4, lambda i, c: (v.assign_add(i), c)[1], 0))
    assert local(pair, v) == [12, 12]


@pytest.mark.parametrize("xs", [np.zeros((0, 3), np.float32), None], ids=["empty", "length"])
def test_an_eager_scan_of_no_steps(pair, xs):
    with pair.scope():
        v = dj.Variable(5.0)

    def body(carry, x):
        return carry + 1, (v.assign_add(1.0), {"x": x})

    options = {} if xs is not None else {"length": 0}
    final, (values, rows) = dj.lax.scan(body, jnp.float32(2), xs, **options)
    assert float(final) == 2 and values.shape == (0,) and float(v.value) == 5
    assert rows["x"] is None if xs is None else rows["x"].shape == (0, 3)


def test_an_eager_scan_without_a_length_is_refused_as_by_jax():
    with pytest.raises(ValueError, match="^scan got no values to scan over"):
        dj.lax.scan(lambda c, x: (c, x), 0, None)
