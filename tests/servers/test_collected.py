"""Values of variables that are gone leave the servers; those that a closure needs do not."""

import gc
import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import distjax as dj

pytestmark = pytest.mark.usefixtures("collect_garbage")  # what other tests have left takes seconds


class Untaken:
    """A lock that must not be taken."""

    def __enter__(self):
        raise AssertionError("a finalizer waits for nobody")

    def __exit__(self, *error):
        pass

    acquire = release = __enter__


def make(**options):
    return dj.ParameterServerStrategy(2, 2, partitioner=dj.parts.FixedShards(3), **options)


def bytes_at(strategy, expected):
    """What the servers hold, at the latest when a worker has let go of the closure it ended."""
    ends = time.monotonic() + 60
    while True:
        gc.collect()
        found = sum(server.report().nbytes for server in strategy.servers)
        if found == expected or time.monotonic() > ends:
            return found


def train_once(strategy):
    with strategy.scope():
        v = dj.Variable(jnp.ones((10, 2)), name="v")
        optimizer = dj.optim.Optimizer(optax.adam(0.1))
        optimizer.init([v])

    def step(x):
        optimizer.apply_gradients([(v.value * x, v)])
        return v.value.sum()

    strategy.run(step, args=(2.0,))
    assert bytes_at(strategy, 4 * (4 + 3 * 20 + 2)) == 4 * (
        4 + 3 * 20 + 2
    )  # adam's count is at both


def test_what_is_gone_leaves_servers_and_loads():
    strategy = make()
    with strategy.scope():
        kept = dj.Variable(jnp.ones(4), name="kept")
    coordinator = dj.Coordinator(strategy)
    for _ in range(3):
        train_once(strategy)
        assert bytes_at(strategy, 16) == 16
    with strategy.scope():
        other = dj.Variable(jnp.ones(1), name="other")
    loads = strategy.extended.placement.loads
    assert sum(loads) == 16 + 4 and other.layout.server is not None
    np.testing.assert_array_equal(kept.value, np.ones(4))
    coordinator.close()


def test_a_closure_in_flight_keeps_what_it_needs():
    held = {}

    def drop(point, worker, closure):
        if point == "pull":
            held.clear()
            gc.collect()

    strategy = make(engine=dj.servers.ThreadEngine(fault=drop))
    with strategy.scope():
        held["v"] = dj.Variable(jnp.ones((10, 2)), name="v")

    def schedule(coordinator):
        v = held["v"]

        def step(x):
            v.assign_add(x * v.value)
            return v.value.sum()

        return coordinator.schedule(step, args=(2.0,))

    with dj.Coordinator(strategy) as coordinator:
        assert schedule(coordinator).fetch() == 60
        coordinator.join()
    assert not held and bytes_at(strategy, 0) == 0


@pytest.mark.filterwarnings("error")
def test_a_finalizer_takes_no_lock():
    strategy = make()
    with strategy.scope():
        v = dj.Variable(jnp.ones((10, 2)), name="v")
    owners = [*strategy.servers, strategy.extended.placement]
    locks = [owner._lock for owner in owners]
    for owner in owners:
        owner._lock = Untaken()
    del v
    gc.collect()
    for owner, lock in zip(owners, locks, strict=True):
        owner._lock = lock
    assert bytes_at(strategy, 0) == 0
