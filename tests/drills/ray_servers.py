"""Processes of Ray's, killed: python -m tests.drills.ray_servers [--seed 0] [--part 1.0].

Prints a table; the end is 1 where a law does not hold.
"""

from __future__ import annotations

import random

import distjax as dj
from tests.drills.servers import Law, judge_digits, main, train_digits
from tests.servers.ray.kills import (
    Counters,
    kill_a_worker,
    run_with_dead_servers,
    run_with_dead_workers,
)

WORKERS, SERVERS, EPOCHS = 100, 10, 10


def make_strategy(workers: int, servers: int = 1) -> dj.ParameterServerStrategy:
    """Returns a strategy all of whose workers have started."""
    engine = dj.servers.RayEngine()
    strategy = dj.ParameterServerStrategy(workers, servers, engine=engine)
    for worker in range(workers):
        engine.prepare(worker, lambda: True)
    return strategy


def outlive_workers(seed: int, count: int) -> tuple[str, bool]:
    """Workers are killed at random moments: each closure is applied once at each server."""
    counters = Counters(make_strategy(2, 2))
    with dj.Coordinator(counters.strategy) as coordinator:
        num_closures = run_with_dead_workers(counters, coordinator, seed, count)
        closures = coordinator.stats()["closures"]
    is_exact = counters.values() == counters.expected and not closures["failed"]
    retried = closures["retried"]
    return f"{count} killed, {num_closures} closures, {retried} tried again", is_exact


def outlive_servers(seed: int, count: int) -> tuple[str, bool]:
    """Servers are killed at random moments: what a snapshot had, and each closure since, once."""
    counters = Counters(make_strategy(2, 2))
    with dj.Coordinator(counters.strategy) as coordinator:
        are_well = run_with_dead_servers(counters, coordinator, seed, count)
    is_exact = counters.values() == counters.expected
    return f"{count} killed, {are_well.count(False)} not undone", is_exact and all(are_well)


def learn_digits(seed: int, num_epochs: int) -> tuple[str, bool]:
    """The digits example by 1, 2 and 4 workers, one of which is killed in the middle."""
    rng = random.Random(seed)
    results = []
    for workers in (1, 2, 4):
        strategy = make_strategy(workers)
        halfway = lambda coordinator: kill_a_worker(coordinator, rng, [])
        results.append(judge_digits(workers, *train_digits(strategy, seed, num_epochs, halfway)))
    return "; ".join(text for text, _ in results), all(is_well for _, is_well in results)


LAWS: dict[Law, int] = {outlive_workers: WORKERS, outlive_servers: SERVERS, learn_digits: EPOCHS}

if __name__ == "__main__":
    main(LAWS, "ray_servers")
