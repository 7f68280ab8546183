"""Under `jax.checking_leaks` a traced function may create variables."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj

MEAN = dj.VariableAggregation.MEAN


@pytest.fixture(autouse=True)
def checking_leaks(collect_garbage):
    """Checks for leaks in the test; what the tests before left is not searched each time."""
    with jax.checking_leaks():
        yield


def test_a_replica_function_creates_a_variable(mirrored):
    made = []

    def step(x):
        if not made:
            made.append(dj.Variable(jnp.zeros(3), aggregation=MEAN))
        made[0].assign_add(x)

    for _ in range(2):
        mirrored.run(step, args=(jnp.ones(3),))
    np.testing.assert_array_equal(made[0].value, np.full(3, 2))


def test_a_function_of_dj_jit_creates_a_variable(mirrored):
    made = []

    @dj.jit
    def step(x):
        if not made:
            made.append(dj.Variable(jnp.zeros(3), aggregation=MEAN))
        made[0].assign_add(x)

    with mirrored.scope():
        for _ in range(2):
            step(jnp.ones(3))
    np.testing.assert_array_equal(made[0].value, np.full(3, 2))


def test_an_optimizer_is_initialized_in_a_replica_function(mirrored):
    with mirrored.scope():
        w = dj.Variable(jnp.zeros(3), aggregation=MEAN)
        optimizer = dj.optim.Optimizer(optax.sgd(1.0, momentum=0.9), reduce_op="mean")

    def step(gradient):
        optimizer.init([w])
        optimizer.apply_gradients([(gradient, w)])

    mirrored.run(step, args=(-jnp.ones(3),))
    np.testing.assert_array_equal(w.value, np.ones(3))


def test_a_step_on_variables_that_exist(mirrored):
    with mirrored.scope():
        w = dj.Variable(jnp.zeros(3), aggregation=MEAN)
    mirrored.run(lambda x: (w.assign_add(x), None)[1], args=(jnp.ones(3),))
    np.testing.assert_array_equal(w.value, np.ones(3))
