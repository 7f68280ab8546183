"""Processes of Ray's, killed: python -m tests.drills.ray_servers [--seed 0] [--part 1.0].

Prints a table; the end is 1 where a law does not hold.
"""

from __future__ import annotations

import random

import distjax as dj
from tests.drills.dead_workers import WatchedEngine, gaps_beside_dead_processes
from tests.drills.servers import Law, judge_digits, main, train_digits
from tests.servers.ray.kills import (
    Counters,
    kill_a_worker,
    run_with_dead_servers,
    run_with_dead_workers,
)

WORKERS, SERVERS, WATCHED, EPOCHS = 100, 10, 20, 20


def make_strategy(
    workers: int, servers: int = 1, engine: dj.servers.RayEngine | None = None
) -> dj.ParameterServerStrategy:
    """Returns a strategy all of whose workers have started."""
    engine = engine or dj.servers.RayEngine()
    strategy = dj.ParameterServerStrategy(workers, servers, engine=engine)
    for worker in range(workers):
        engine.prepare(worker, lambda: True)
    return strategy


def outlive_workers(seed: int, count: int) -> tuple[str, bool]:
    """Workers are killed at random moments: each closure is applied once at each server."""
    counters = Counters(make_strategy(2, 2))
    with dj.Coordinator(counters.strategy) as coordinator:
        num_closures, _ = run_with_dead_workers(counters, coordinator, seed, count)
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


def wait_for_nobody(seed: int, count: int) -> tuple[str, bool]:
    """Workers are killed: how long others got no closure, beside three of their median ones."""
    engine = WatchedEngine()
    counters = Counters(make_strategy(3, 2, engine))
    rng = random.Random(seed)
    schedule = lambda coordinator: counters.schedule(coordinator, rng)
    gaps = gaps_beside_dead_processes(counters.strategy, engine, schedule, rng, count)
    worst = max(gaps, key=lambda gap: gap.seconds / gap.bound)
    text = (
        f"{count} killed, the worst gap {worst.seconds:.2f} s where {worst.bound:.2f} are allowed"
    )
    return text, all(gap.seconds <= gap.bound for gap in gaps)


def learn_digits(seed: int, num_epochs: int) -> tuple[str, bool]:
    """The digits example by 1, 2 and 4 workers, one of which is killed in the middle."""
    rng = random.Random(seed)
    results = []
    for workers in (1, 2, 4):
        strategy = make_strategy(workers)
        halfway = lambda coordinator: kill_a_worker(coordinator, rng, [])
        results.append(judge_digits(workers, *train_digits(strategy, seed, num_epochs, halfway)))
    return "; ".join(text for text, _ in results), all(is_well for _, is_well in results)


LAWS: dict[Law, int] = {
    outlive_workers: WORKERS,
    outlive_servers: SERVERS,
    wait_for_nobody: WATCHED,
    learn_digits: EPOCHS,
}

if __name__ == "__main__":
    main(LAWS, "ray_servers")
