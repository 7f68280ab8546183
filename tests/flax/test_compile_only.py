"""Models on devices that programs can only be compiled for: those of the CPU stand for them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import distjax as dj
from distjax._src import jax_compat
from tests.live_arrays import no_new_arrays

STRATEGIES = {
    "mirrored": dj.MirroredStrategy,
    "zero3": lambda devices: dj.ShardedStrategy(devices, partition="parameters", min_split_bytes=0),
}


@pytest.fixture(params=[*STRATEGIES])
def strategy(request, monkeypatch):
    monkeypatch.setattr(jax_compat, "only_compiles", lambda devices: True)
    return STRATEGIES[request.param](jax.devices()[:2])


def make_batch(strategy):
    topology = strategy.extended.topology
    rows = jax.ShapeDtypeStruct((2, 8, 4), jnp.float32, sharding=topology.per_replica)
    return dj.PerReplica(rows, topology)


def test_a_module_is_created_and_its_step_compiled(strategy):
    with no_new_arrays(), strategy.scope():
        model = dj.flax.create(lambda: nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    kernel = model.kernel.get_raw_value()
    assert (kernel.shape, kernel.dtype) == ((4, 2), jnp.float32)
    described = {v.name: v.bytes_per_device for v in strategy.describe().variables}
    parts = 1 if isinstance(strategy, dj.MirroredStrategy) else 2
    assert described == {"Linear.kernel": 32 // parts, "Linear.bias": 8 // parts}

    def step(model, x):
        model.kernel[...] -= dj.get_replica_context().all_reduce("mean", x.T @ x @ model.kernel)

    lowered = dj.jit(lambda model, x: strategy.run(step, args=(model, x)))
    assert "all-reduce" in lowered.lower(model, make_batch(strategy)).compile().as_text()


def test_a_linen_state_is_placed_and_its_step_compiled(strategy):
    model = nn.Dense(2)

    def make():
        params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))

    state = strategy.extended.broadcast_to(jax.eval_shape(make))
    mirrored = strategy.extended.topology.mirrored
    assert all(x.sharding == mirrored for x in jax.tree.leaves(state))

    def step(state, x):
        loss = lambda params: jnp.mean(state.apply_fn({"params": params}, x) ** 2)
        gradient = dj.get_replica_context().all_reduce("mean", jax.grad(loss)(state.params))
        return state.apply_gradients(grads=gradient)

    lowered = dj.jit(lambda state, x: strategy.run(step, args=(state, x)))
    assert "all-reduce" in lowered.lower(state, make_batch(strategy)).compile().as_text()
