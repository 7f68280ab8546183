"""Processes of Ray's killed while closures run: what was applied, beside what should have been."""

import gc
import os
import random
import signal

import jax.numpy as jnp

import distjax as dj
from distjax.errors import ServerLostError


class Counters:
    """Numbers at the servers of a strategy, and steps that add to them."""

    def __init__(self, strategy):
        self.strategy = strategy
        gc.collect()  # the variables of other tests go now, and not between these
        with strategy.scope():
            # Both servers are to have something: one of which nothing is used may die unseen.
            self.first = dj.Variable(jnp.int8(0))  # as it is made, those that are gone are counted
            loads = strategy.extended.at_servers.loads
            self.filler = dj.Variable(jnp.zeros(max(loads) - min(loads), jnp.int8))
            self.near, self.far, self.chained = (
                dj.Variable(jnp.int32(0), aggregation=dj.VariableAggregation.SUM) for _ in range(3)
            )
        self.expected = [0, 0, 0]

    def both(self, x):
        """One push, to the servers of two variables."""
        self.near.assign_add(x)
        self.far.assign_add(2 * x)

    def chain(self, x):
        """Two pushes, the second of what the first one answers."""
        context = dj.get_replica_context()
        add = lambda strategy, x: self.near.assign_add(x) * 0 + x
        x = context.merge_call(add, args=(x,))
        context.merge_call(lambda strategy, x: self.chained.assign_add(x), args=(x,))

    def schedule(self, coordinator, rng):
        """Schedules one of the two."""
        x, is_chain = rng.randrange(100), rng.random() < 0.3
        self.expected[0] += x
        self.expected[2 if is_chain else 1] += x if is_chain else 2 * x
        return coordinator.schedule(self.chain if is_chain else self.both, args=(jnp.int32(x),))

    def values(self):
        """What the servers have."""
        return [int(v.value) for v in (self.near, self.far, self.chained)]


def kill_a_worker(coordinator, rng, killed):
    """Sends SIGKILL to a worker that is up and was not killed before; returns whether one was."""
    pids = [worker["pid"] for worker in coordinator.stats()["workers"]]
    pids = [pid for pid in pids if pid is not None and pid not in killed]
    if pids:
        killed.append(rng.choice(pids))
        os.kill(killed[-1], signal.SIGKILL)
    return bool(pids)


def run_with_dead_workers(counters, coordinator, seed, num_kills):
    """Schedules closures until so many workers were killed; returns how many closures, and pids."""
    rng, killed, num_closures = random.Random(seed), [], 0
    while len(killed) < num_kills:
        for _ in range(rng.randrange(1, 12)):
            counters.schedule(coordinator, rng)
            num_closures += 1
        kill_a_worker(coordinator, rng, killed)
    coordinator.join()
    return num_closures, killed


def run_with_dead_servers(counters, coordinator, seed, num_kills):
    """Kills a server again and again, and restores; returns whether each was seen and undone."""
    rng = random.Random(seed)
    are_well = []
    for _ in range(num_kills):
        coordinator.join()
        snapshot, before = coordinator.snapshot(), list(counters.expected)
        server = rng.choice(coordinator.stats()["servers"])
        last = rng.randrange(8)
        try:
            for i in range(8):
                counters.schedule(coordinator, rng)
                if i == last:
                    os.kill(server["pid"], signal.SIGKILL)
            coordinator.join()
            coordinator.schedule(counters.both, args=(jnp.int32(0),))
            coordinator.join()
            is_seen = False
        except ServerLostError:
            is_seen = True
        is_held = coordinator.restore() == snapshot.closures
        try:
            coordinator.join()  # the closures that were undone are raised once
        except ServerLostError:
            pass
        counters.expected = before
        are_well.append(is_seen and is_held and counters.values() == before)
        for _ in range(5):
            counters.schedule(coordinator, rng)
    coordinator.join()
    return are_well
