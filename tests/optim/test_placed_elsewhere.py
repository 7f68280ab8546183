"""The same training where variables are split over the replicas, or kept on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from tests.optim.regression import (
    assert_close,
    loss_fn,
    make_data,
    make_variables,
    plain,
    train,
    values,
)

DEVICES = jax.devices()[:2]
PLACED = {
    "zero1": lambda: dj.ShardedStrategy(DEVICES, min_split_bytes=0),
    "zero2": lambda: dj.ShardedStrategy(DEVICES, partition="gradients", min_split_bytes=0),
    "zero3": lambda: dj.ShardedStrategy(DEVICES, partition="parameters", min_split_bytes=0),
    "central_storage": lambda: dj.CentralStorageStrategy(DEVICES),
}


@pytest.fixture(params=list(PLACED))
def placed(request):
    return PLACED[request.param]()


@pytest.mark.pairwise
@pytest.mark.parametrize("steps", [1, 2], ids=["each_step", "accumulated"])
def test_training_equals_optax_on_one_device(placed, how, steps):
    inner = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))
    variables, _ = train(placed, inner, 4, how, accumulate_steps=steps)
    expected = plain(optax.MultiSteps(inner, steps).gradient_transformation(), 4)
    for key, value in expected.items():
        np.testing.assert_allclose(variables[key].value, value, rtol=2e-5, atol=1e-6)


def test_slots_live_as_colocate_vars_with_says(placed):
    variables = make_variables(placed)
    optimizer = dj.optim.Optimizer(optax.adam(0.1))
    optimizer.init(variables)
    adam = optimizer.state[0]
    for key, variable in variables.items():
        with placed.scope(), placed.extended.colocate_vars_with(variable):
            beside = dj.Variable(jnp.zeros(variable.shape))
        assert dj.locality(adam.mu[key]) == dj.locality(adam.nu[key]) == dj.locality(beside)
    kind = "host" if isinstance(placed, dj.CentralStorageStrategy) else "partitioned"
    assert dj.locality(adam.mu["w"]).kind == kind


def test_zero_1_splits_moments_only():
    strategy = PLACED["zero1"]()
    variables = make_variables(strategy)
    optimizer = dj.optim.Optimizer(optax.adam(0.1))
    optimizer.init(variables)
    assert dj.locality(variables["w"]).kind == "mirrored"
    assert dj.locality(optimizer.state[0].count).kind == "mirrored"
    for shard in optimizer.state[0].mu["w"].storage.addressable_shards:
        assert shard.data.size == variables["w"].size // 2


def test_in_steps_on_an_iterator(strategy):
    """K steps with an optimizer in one compiled loop: the state is carried."""
    variables = make_variables(strategy)
    optimizer = dj.optim.Optimizer(optax.adam(0.05), "mean", accumulate_steps=2)
    optimizer.init(variables)

    def replica_step(batch):
        grads = jax.grad(loss_fn)(values(variables), *batch)
        optimizer.apply_gradients([(grads, variables)])

    def step(context, batch):
        strategy.run(replica_step, args=(batch,))

    iterator = iter(strategy.distribute_dataset([make_data(i) for i in range(6)]))
    context = strategy.extended.run_steps_on_iterator(step, iterator, 6)
    assert context.iterations == 6
    assert_close(
        variables, plain(optax.MultiSteps(optax.adam(0.05), 2).gradient_transformation(), 6)
    )
