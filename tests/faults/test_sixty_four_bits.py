"""With 64-bit numbers variables, steps and iterators work in derivatives as without them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import TraceLeakError

MEAN = dj.VariableAggregation.MEAN


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def make(strategy):
    with strategy.scope():
        return dj.Variable(jnp.arange(3.0), name="w", aggregation=MEAN)


def test_a_variable_is_read_in_grad(pair):
    w = make(pair)
    gradient = jax.grad(lambda x: jnp.sum(x * w.value))(jnp.ones(3))
    np.testing.assert_array_equal(gradient, np.arange(3.0))


def test_a_variable_is_read_in_vmap(pair):
    w = make(pair)
    out = jax.vmap(lambda x: x * w.value)(jnp.ones((2, 3)))
    np.testing.assert_array_equal(out, [np.arange(3.0)] * 2)


def test_a_variable_read_in_jit_is_the_leak_that_it_is(pair):
    w = make(pair)
    with pytest.raises(TraceLeakError):
        jax.jit(lambda x: x * w.value)(jnp.ones(3))


def test_grad_around_a_run_that_reads_a_variable(pair):
    w = make(pair)

    def loss(x):
        fn = lambda x: dj.get_replica_context().all_reduce("mean", jnp.sum(x * w.value))
        return pair.run(fn, args=(x,))

    np.testing.assert_array_equal(jax.grad(loss)(jnp.ones(3)), np.arange(3.0))


def test_grad_around_a_program_that_reads_a_variable(pair):
    w = make(pair)
    program = dj.jit(lambda x: jnp.sum(x * w.value))
    np.testing.assert_array_equal(jax.grad(program)(jnp.ones(3)), np.arange(3.0))


def test_the_next_element_is_taken_in_grad(pair):
    iterator = iter(pair.distribute_dataset([np.arange(4.0)]))

    def loss(x):
        return x * jnp.sum(next(iterator).stacked)

    assert float(jax.grad(loss)(2.0)) == 6


def test_a_step_works_and_keeps_its_dtype(pair):
    w = make(pair)
    pair.run(lambda x: (w.assign_add(x), None)[1], args=(jnp.ones(3),))
    assert w.value.dtype == jnp.float64
    np.testing.assert_array_equal(w.value, np.arange(3.0) + 1)
