"""Random faults of workers: what was applied, beside what should have been."""

import random
import threading

import numpy as np

from distjax._src.servers.coordinator import Coordinator
from distjax._src.servers.engine import WorkerDied
from tests.servers.hand_made import HandMade, two_counters, two_stages


def run_with_faults(seed, *, num_closures, max_staleness=None, rate=0.15, workers=4):
    """Runs closures of one push to two servers, and of two stages, while workers die."""
    rng, lock, faults = random.Random(seed), threading.Lock(), [0]

    def fault(point, worker, closure):
        with lock:
            if point != "server" and rng.random() < rate:
                faults[0] += 1
                raise WorkerDied(point)

    strategy = HandMade(workers=workers, servers=2, max_staleness=max_staleness, fault=fault)
    strategy.engine.max_failures = 100
    for server, key in ((0, "a"), (1, "b"), (0, "c")):
        strategy.engine.servers[server].create(key, np.int32(0))
    both, chain = two_counters(np.int32), two_stages("c", np.int32)
    numbers = [rng.randrange(100) for _ in range(num_closures)]
    is_chain = [rng.random() < 0.3 for _ in numbers]
    with Coordinator(strategy) as coordinator:
        for x, second in zip(numbers, is_chain, strict=True):
            coordinator.schedule(chain if second else both, (np.int32(x),))
        coordinator.join()
        worst = max(coordinator.stats()["staleness"])
    plain = sum(x for x, second in zip(numbers, is_chain, strict=True) if not second)
    pushes = num_closures + sum(is_chain), num_closures - sum(is_chain)
    return {
        "faults": faults[0],
        "worst": worst,
        "applied": (int(strategy.value("b", 1)), *(s.version for s in strategy.engine.servers)),
        "expected": (2 * plain, *pushes),
        "sum": (int(strategy.value("a")), sum(numbers)),
        "kept": sum(server.report().num_kept for server in strategy.engine.servers),
    }
