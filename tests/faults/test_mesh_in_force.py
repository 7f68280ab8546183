"""Under a mesh of the user's (`jax.set_mesh`) everything works as without one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import distjax as dj

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]),
    "virtual": lambda: dj.VirtualStrategy(2),
    "one_device": dj.OneDeviceStrategy,
    "central": lambda: dj.CentralStorageStrategy(jax.devices()[:2]),
}


def make(strategy):
    with strategy.scope():
        return dj.Variable(jnp.zeros(4), aggregation=dj.VariableAggregation.MEAN)


def written(strategy):
    v = make(strategy)
    v.assign_add(jnp.ones(4))
    return v.value


def run(strategy):
    return strategy.run(lambda x: dj.get_replica_context().all_reduce("mean", x), (jnp.ones(4),))


def run_of_numpy(strategy):
    return strategy.run(lambda x: dj.get_replica_context().all_reduce("mean", x), (np.ones(4),))


def step(strategy):
    v = make(strategy)
    strategy.run(lambda x: (v.assign_add(x), None)[1], args=(jnp.ones(4),))
    return v.value


def jit(strategy):
    v = make(strategy)
    dj.jit(lambda x: strategy.run(lambda x: (v.assign_add(x), None)[1], args=(x,)))(jnp.ones(4))
    return v.value


def updated(strategy):
    v = make(strategy)
    strategy.extended.update(v, lambda v: v.assign_add(jnp.ones(4)))
    return v.value


def reduced_batch(strategy):
    (batch,) = strategy.distribute_dataset([np.ones((8, 4))])
    return strategy.reduce("mean", batch, axis=0)


def optimized(strategy):
    v = make(strategy)
    with strategy.scope():
        optimizer = dj.optim.Optimizer(optax.sgd(1.0), reduce_op="mean")
        optimizer.init([v])
    strategy.run(lambda: optimizer.apply_gradients([(-jnp.ones(4), v)]))
    return v.value


OPERATIONS = [written, run, run_of_numpy, step, jit, updated, reduced_batch, optimized]


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda fn: fn.__name__)
def test_an_operation_under_a_mesh_gives_what_it_gives_without(name, operation, kind):
    with jax.set_mesh(jax.make_mesh((8,), ("batch",), axis_types=(AxisType[kind],))):
        result = operation(STRATEGIES[name]())
    np.testing.assert_array_equal(result, np.ones(4))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda fn: fn.__name__)
def test_an_operation_without_a_mesh(name, operation):
    np.testing.assert_array_equal(operation(STRATEGIES[name]()), np.ones(4))
