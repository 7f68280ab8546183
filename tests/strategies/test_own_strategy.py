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


class BesideItsVariable(MirroredPlacement):
    """Takes the layout of the variable that a new one is colocated with."""

    def layout(self, shape, dtype, colocate_with=None):
        is_beside = colocate_with is not None
        return colocate_with.layout if is_beside else super().layout(shape, dtype)


def test_a_variable_beside_a_sync_on_read_one_has_no_layout_of_it(pair):
    """A `[3]` variable had a value per replica, `[2, 3]`."""
    topology = pair.extended.topology
    strategy = dj.Strategy(dj.StrategyExtended(topology, BesideItsVariable(topology)))
    on_read, aggregation = dj.VariableSynchronization.ON_READ, dj.VariableAggregation.SUM
    with strategy.scope():
        total = dj.Variable(jnp.zeros(3), synchronization=on_read, aggregation=aggregation)
        plain = dj.Variable(jnp.zeros(3))
        with strategy.extended.colocate_vars_with(plain):
            assert dj.Variable(jnp.ones(3)).layout == plain.layout
        with strategy.extended.colocate_vars_with(total), pytest.raises(ValueError) as caught:
            dj.Variable(jnp.ones(3))
    assert str(caught.value) == (
        "BesideItsVariable.layout needs to return a layout of one value.\n"
        "  Got: a StackedLayout, that of colocate_with perhaps.\n"
        "  Why: the variable has one value, which such a layout would take for one per replica.\n"
        "  Fix: self.layout(colocate_with.shape, colocate_with.dtype) in place of its layout"
    )
