"""Variables on devices that programs can only be compiled for: a type is there, and no array.

`jax.experimental.topologies` describes such devices; here those of the CPU stand for them.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj
from distjax._src import jax_compat
from distjax.errors import UnsupportedError
from tests.live_arrays import no_new_arrays

AGG, SYNC = dj.VariableAggregation, dj.VariableSynchronization


STRATEGIES = {
    "mirrored": dj.MirroredStrategy,
    "central": dj.CentralStorageStrategy,
    "zero3": lambda devices: dj.ShardedStrategy(devices, partition="parameters", min_split_bytes=0),
}


@pytest.fixture(params=[*STRATEGIES])
def strategy(request, monkeypatch):
    monkeypatch.setattr(jax_compat, "only_compiles", lambda devices: True)
    return STRATEGIES[request.param](jax.devices()[:2])


def make(strategy, value, **options):
    with strategy.scope():
        return dj.Variable(value, name="v", **options)


@pytest.mark.parametrize("value", [np.ones((4, 3), np.float32), lambda: jnp.ones((4, 3))])
@pytest.mark.parametrize("synchronization", [SYNC.ON_WRITE, SYNC.ON_READ])
def test_no_array_is_made(strategy, value, synchronization):
    with no_new_arrays():
        v = make(strategy, value, synchronization=synchronization, aggregation=AGG.SUM)
    assert (v.shape, v.dtype) == ((4, 3), jnp.float32)
    assert v.storage.sharding == v.sharding
    assert "<th>value" not in v._repr_html_()
    (described,) = strategy.describe().variables
    assert described.bytes_per_device + described.host_bytes > 0


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_an_optimizer_is_initialized_and_its_step_compiled(strategy, accumulate_steps):
    w = make(strategy, np.ones((4, 3), np.float32))
    optimizer = dj.optim.Optimizer(optax.adam(0.1), "mean", accumulate_steps=accumulate_steps)
    with no_new_arrays():
        optimizer.init([w])
    state = [v for v in jax.tree.leaves(optimizer.state) if isinstance(v, dj.Variable)]
    kept = [*state, *optimizer.accumulators]
    assert len(kept) == (3 if accumulate_steps == 1 else 5)
    assert all(v.storage.sharding == v.sharding for v in kept)

    def step(x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w.value)
        optimizer.apply_gradients([(gradient, w)])

    topology = strategy.extended.topology
    batch = jax.ShapeDtypeStruct((2, 8, 4), jnp.float32, sharding=topology.per_replica)
    lowered = dj.jit(lambda x: strategy.run(step, args=(x,))).lower(dj.PerReplica(batch, topology))
    assert lowered.compile().memory_analysis() is not None


def test_nothing_has_a_value_there(strategy):
    v = make(strategy, np.ones(4, np.float32), aggregation=AGG.SUM)
    uses = (
        lambda: v.value,
        lambda: v.assign(jnp.zeros(4)),
        lambda: v.assign_add(jnp.zeros(4)),
        v.local_results,
        lambda: copy.copy(v),
        lambda: strategy.run(lambda: v.value),
        lambda: strategy.run(lambda: v.assign_add(jnp.ones(4))),
        lambda: strategy.extended.update(v, lambda v: v.assign(jnp.zeros(4))),
    )
    for use in uses:
        with pytest.raises(UnsupportedError) as caught:
            use()
        assert str(caught.value).splitlines() == [
            "variable 'v' needs real devices to have a value.",
            "  Got: a strategy on devices of jax.experimental.topologies.",
            "  Why: programs can be compiled for such devices, but nothing runs on them.",
            "  Fix: dj.jit(step).lower(*args).compile(), or a strategy on jax.devices()",
        ]
