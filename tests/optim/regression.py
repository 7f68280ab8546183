"""A linear regression, on one device by plain optax and on a strategy, for tests."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distjax as dj
from tests.replicas import per_replica

NUM_EXAMPLES = 24  # divides by 1, 2, 3 and 8


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(NUM_EXAMPLES, 3)).astype(np.float32)
    y = rng.normal(size=(NUM_EXAMPLES, 2)).astype(np.float32)
    return x, y


def initial():
    rng = np.random.default_rng(7)
    return {"b": np.zeros(2, np.float32), "w": rng.normal(size=(3, 2)).astype(np.float32)}


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def plain(tx, steps, data=make_data):
    """Returns the parameters after `steps` of optax on one device, batch by batch."""

    @jax.jit
    def step(params, state, x, y):
        updates, state = tx.update(jax.grad(loss_fn)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.asarray, initial())
    state = tx.init(params)
    for i in range(steps):
        params, state = step(params, state, *data(i))
    return params


def make_variables(strategy):
    with strategy.scope():
        return {key: dj.Variable(value, name=key) for key, value in initial().items()}


def values(tree):
    return jax.tree.map(lambda v: v.value, tree)


def split(strategy, array):
    """Returns the batch with an equal part of the examples on each replica."""
    count = strategy.num_replicas_in_sync
    return per_replica(strategy, array.reshape(count, len(array) // count, *array.shape[1:]))


def train(
    strategy, tx, steps, how=lambda step: step, *, reduce_op="mean", data=make_data, **options
):
    """Returns the variables after `steps` of `dj.optim`, and the optimizer."""
    variables = make_variables(strategy)
    optimizer = dj.optim.Optimizer(tx, reduce_op, **options)
    optimizer.init(variables)

    def replica_step(x, y):
        grads = jax.grad(loss_fn)(values(variables), x, y)
        optimizer.apply_gradients([(grads, variables)])

    step = how(lambda x, y: strategy.run(replica_step, args=(x, y)))
    for i in range(steps):
        step(*(split(strategy, array) for array in data(i)))
    return variables, optimizer


def assert_close(variables, expected, rtol=2e-5):
    for key, value in expected.items():
        np.testing.assert_allclose(variables[key].value, value, rtol=rtol, atol=1e-6)
        for component in variables[key].local_results():
            np.testing.assert_array_equal(component, variables[key].value)
