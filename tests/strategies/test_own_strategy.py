"""A strategy of one's own: parts put together, and a subclass of StrategyExtended."""

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from distjax.parts import MirroredPlacement, mesh_topology
from tests.replicas import ids


class CountingExtended(dj.StrategyExtended):
    """All logic is here (as TF 1.13 asks): a mirrored strategy that counts its reductions."""

    def __init__(self, devices):
        topology = mesh_topology(devices, dj.REPLICA_AXIS)
        super().__init__(topology, MirroredPlacement(topology))
        self.num_reductions = 0

    def reduce_to(self, op, value, destinations):
        self.num_reductions += 1
        return super().reduce_to(op, value, destinations)


class CountingStrategy(dj.Strategy):
    """Only makes its extended."""

    def __init__(self, devices):
        super().__init__(CountingExtended(devices))


@pytest.mark.api_row("a strategy of one's own", "StrategyExtended(container_strategy)")
def test_a_subclass_of_strategy_extended():
    strategy = CountingStrategy(jax.devices()[:2])
    assert strategy.extended.strategy is strategy
    with strategy.scope():
        w = dj.Variable(10.0)

    def merge_fn(strategy, g):
        assert isinstance(strategy, CountingStrategy)
        g = strategy.extended.reduce_to("sum", g, w)
        strategy.extended.update(w, lambda w, g: w.assign_sub(0.5 * g), args=(g,))

    def fn(r):
        dj.get_replica_context().merge_call(merge_fn, args=(r + 1,))
        return w.value

    assert float(strategy.run(fn, args=(ids(strategy),))) == 8.5
    assert strategy.extended.num_reductions >= 1  # merge functions may be traced more than once
    counted = strategy.extended.num_reductions
    assert float(strategy.extended.reduce_to("sum", ids(strategy), None)) == 1.0
    assert strategy.extended.num_reductions == counted + 1


@pytest.mark.api_row("several devices of one host")
def test_one_replica_per_device():
    strategy = CountingStrategy(jax.devices())
    assert strategy.num_replicas_in_sync == len(jax.devices())
    assert strategy.extended.worker_devices == tuple(jax.devices())
    total = strategy.run(lambda: dj.get_replica_context().all_reduce("sum", jnp.float32(1)))
    assert float(total) == len(jax.devices())
