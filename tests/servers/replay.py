"""Runs a step asynchronously while workers die, and again from the record, one push at a time."""

import random
import threading

import jax
import numpy as np

from distjax._src.servers.coordinator import Coordinator
from distjax._src.servers.engine import WorkerDied
from tests.servers.hand_made import HandMade, sgd


class Record:
    """What servers applied.

    Attributes:
      applied: by server: by version: the closure.
      pulled: by closure: by server: the version pulled by the attempt whose push was applied.
    """

    def __init__(self, servers):
        self.applied = [{} for _ in servers]
        self.pulled = {}
        for server in servers:
            server.push = self._watched(server.number, server.push)

    def _watched(self, number, push):
        def watched(key, *args, pulled, **options):
            closure, _ = key
            self.pulled.setdefault(closure, {}).setdefault(number, pulled)
            answer = push(key, *args, pulled=pulled, **options)
            self.applied[number].setdefault(answer.version, closure)
            return answer

        return watched


def run_recorded(seed):
    """Returns final values of an asynchronous run, and what its record comes to."""
    rng, lock = random.Random(seed), threading.Lock()
    num_servers, num_closures = rng.randint(1, 3), rng.randint(5, 20)
    rate, bound = rng.choice([0, 0.1, 0.3]), rng.choice([None, None, 0, 1, 3])

    def fault(point, worker, closure):
        with lock:
            if point != "server" and rng.random() < rate:
                raise WorkerDied

    strategy = HandMade(
        workers=rng.randint(1, 4), servers=num_servers, max_staleness=bound, fault=fault
    )
    strategy.engine.max_failures = 100
    first = [np.linspace(-1, 1, 5, dtype=np.float32) + i for i in range(num_servers)]
    for server, value in zip(strategy.engine.servers, first, strict=True):
        server.create(f"w{server.number}", value)
    record = Record(strategy.engine.servers)
    xs = [np.float32(rng.random()) for _ in range(num_closures)]
    step = sgd(num_servers)
    with Coordinator(strategy) as coordinator:
        numbers = [coordinator.schedule(step, (x,))._closure.number for x in xs]
        coordinator.join()
    final = [np.asarray(strategy.value(f"w{i}", i)) for i in range(num_servers)]
    return final, replay(step.plan, record, dict(zip(numbers, xs, strict=True)), first)


def replay(plan, record, xs, first):
    """Returns the final values: each server in its own order of versions."""
    (stage,) = plan.stages
    gradients, update = jax.jit(stage.program.fn), jax.jit(stage.pushes[0].program.fn)
    values = [[value] for value in first]  # by server and version
    num_left = sum(map(len, record.applied))
    assert num_left == len(first) * len(xs), "each closure once at each server"
    while num_left:
        before = num_left
        for server, mine in enumerate(values):
            closure = record.applied[server].get(len(mine))
            pulled = record.pulled.get(closure, {})
            if closure is None or any(len(values[s]) <= v for s, v in pulled.items()):
                continue  # it has pulled what is not replayed yet
            snapshot = [values[s][pulled[s]] for s in range(len(values))]
            gradient = gradients(xs[closure], *snapshot)[server]
            mine.append(update(mine[-1], gradient)[0])
            num_left -= 1
        assert num_left < before, "a pull of what came later"
    return [np.asarray(mine[-1]) for mine in values]
