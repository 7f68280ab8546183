"""A generator that waits in a block changes no context but the one that it was entered in."""

import contextvars

import jax.numpy as jnp
import pytest

import distjax as dj
from distjax._src.context import frames
from tests.context.test_threads import in_thread
from tests.replicas import local


def blocks(strategy):
    """Waits in a scope and in a block of `colocate_vars_with`."""
    with strategy.scope():
        v = dj.Variable(jnp.ones(2))
        with strategy.extended.colocate_vars_with(v):
            yield


def handed(strategy):
    """Waits in a block of a stack that was handed over."""
    with frames.with_stack((frames.Frame(strategy),)):
        yield


def waiting(make):
    """Returns a generator that began in a context of its own."""

    def begin():
        generator = make(dj.VirtualStrategy(2))
        next(generator)
        return generator

    return contextvars.copy_context().run(begin)


@pytest.mark.parametrize("make", [blocks, handed])
def test_finalised_in_a_step(make):
    strategy, held = dj.VirtualStrategy(4), [waiting(make)]

    def step():
        held.clear()
        replica = dj.get_replica_context().replica_id_in_sync_group
        return dj.get_strategy().num_replicas_in_sync, replica * jnp.ones(())

    number, replicas = strategy.run(step)
    assert number == 4
    assert local(strategy, replicas) == [0, 1, 2, 3]


@pytest.mark.parametrize("make", [blocks, handed])
def test_finalised_in_a_scope_of_another_thread(make):
    strategy, held = dj.VirtualStrategy(4), [waiting(make)]

    def collect():
        with strategy.scope():
            held.clear()
            return dj.get_strategy(), dj.Variable(0.0).strategy

    assert in_thread(collect) == (strategy, strategy)


@pytest.mark.parametrize("make", [blocks, handed])
def test_finalised_in_an_update(make):
    strategy, held = dj.VirtualStrategy(4), [waiting(make)]
    with strategy.scope():
        v = dj.Variable(jnp.zeros(2))

    def change(v):
        held.clear()
        v.assign_add(jnp.ones(2))
        return dj.get_strategy() is strategy

    assert strategy.extended.update(v, change) is True
    assert v.value.tolist() == [1, 1]


def test_finalised_in_a_step_of_the_same_context():
    strategy = dj.VirtualStrategy(2)
    held = [blocks(strategy)]
    next(held[0])

    def step():
        held.clear()
        return dj.get_replica_context().replica_id_in_sync_group * jnp.ones(())

    assert local(strategy, strategy.run(step)) == [0, 1]
    assert frames.stack() == ()


def test_gone_on_with_in_a_step_of_the_same_context():
    strategy = dj.VirtualStrategy(2)

    def step():
        assert next(generator, "ended") == "ended"
        return dj.get_replica_context().replica_id_in_sync_group * jnp.ones(())

    with strategy.scope():
        generator = colocated(strategy, dj.Variable(3.0))
        next(generator)
        assert local(strategy, strategy.run(step)) == [0, 1]
        assert len(frames.stack()) == 1


def test_left_waiting_by_a_step():
    """What the step entered ends with it: its state would be that of a trace that is over."""
    strategy, held = dj.VirtualStrategy(2), []
    with strategy.scope():
        v = dj.Variable(3.0)

    def merge(strategy):
        generator = colocated(strategy, v)
        next(generator)
        held.append(generator)

    strategy.run(lambda: dj.get_replica_context().merge_call(merge))
    assert frames.stack() == ()
    held.clear()
    assert frames.stack() == () and float(v.value) == 3.0


def colocated(strategy, v):
    with strategy.extended.colocate_vars_with(v):
        yield
