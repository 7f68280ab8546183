"""A generator that waits in a scope and is finalized elsewhere changes nothing there."""

import contextvars

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.own_threads import on_own_thread


@pytest.fixture
def suspended():
    """A list that holds a generator, started in another context, which waits in two blocks.

    Its strategy is VirtualStrategy(2). The generator is finalized when the list is cleared.
    """
    strategy, held = dj.VirtualStrategy(2), []
    with strategy.scope():
        v = dj.Variable(jnp.ones(2))

    def layers():
        with strategy.scope(), strategy.extended.colocate_vars_with(v):
            yield 1

    def start():
        generator = layers()
        next(generator)
        held.append(generator)

    contextvars.copy_context().run(start)  # an asyncio task, or another thread
    return held


@on_own_thread
def test_a_generator_finalised_in_a_step_leaves_the_steps_context(suspended):
    strategy = dj.VirtualStrategy(4)

    def step():
        suspended.clear()  # the garbage collector, say
        replica = dj.get_replica_context().replica_id_in_sync_group
        return dj.get_strategy().num_replicas_in_sync, replica * jnp.ones(1)

    num_replicas, replicas = strategy.run(step)
    assert num_replicas == 4
    assert np.ravel(strategy.local_results(replicas)).tolist() == [0, 1, 2, 3]


@on_own_thread
def test_a_generator_finalised_in_a_scope_leaves_the_scope(suspended):
    strategy = dj.VirtualStrategy(4)

    def collect():
        with strategy.scope():
            suspended.clear()
            return dj.get_strategy(), dj.Variable(0.0).strategy

    assert collect() == (strategy, strategy)


@on_own_thread
def test_a_generator_finalised_in_an_update_leaves_the_update(suspended):
    strategy = dj.VirtualStrategy(4)
    with strategy.scope():
        v = dj.Variable(jnp.zeros(2))

    def change(v):
        suspended.clear()
        v.assign_add(jnp.ones(2))
        return dj.get_strategy() is strategy

    is_in_force = strategy.extended.update(v, change)
    assert is_in_force is True
    np.testing.assert_array_equal(v.value, np.ones(2))


@on_own_thread
def test_a_generator_that_waits_in_a_plain_scope_leaves_the_steps_context():
    strategy, held = dj.VirtualStrategy(4), []

    def layers():
        with dj.VirtualStrategy(2).scope():
            yield 1

    def start():
        generator = layers()
        next(generator)
        held.append(generator)

    def step():
        held.clear()
        return dj.get_strategy().num_replicas_in_sync

    contextvars.copy_context().run(start)
    assert strategy.run(step) == 4
