"""The defaults of `average_loss` and `Optimizer` fit: together they train on the mean."""

import inspect

import jax
import jax.numpy as jnp
import optax

import distjax as dj


def test_the_default_op_is_a_sum():
    parameters = inspect.signature(dj.losses.average_loss).parameters
    assert parameters["op"].default == "sum"


def test_both_defaults_together_train_with_the_gradient_of_the_mean(pair):
    with pair.scope():
        w = dj.Variable(0.0, aggregation=dj.VariableAggregation.MEAN)
        optimizer = dj.optim.Optimizer(optax.sgd(1.0))
        optimizer.init([w])

    def step(x):
        gradient = jax.grad(lambda w: dj.losses.average_loss(w * x))(w.value)
        optimizer.apply_gradients([(gradient, w)])

    pair.run(step, args=(jnp.ones(4),))
    assert float(w.value) == -1
