"""Whether anybody waits for a worker that is dead: how fast the others go on meanwhile."""

from __future__ import annotations

import collections
import itertools
import statistics
import threading
import time
from typing import NamedTuple

import numpy as np
import psutil

import distjax as dj
from tests.servers.hand_made import HandMade, two_counters
from tests.servers.ray.kills import kill_a_worker

_CLOSURE_SECONDS = 0.004  # of a worker that is a thread: it stands still, and needs no core
_CLOSURES_OF_A_ROUND = 240
_IN_HAND = 2  # closures that a worker has at most


def rates_beside_a_hanging_thread(num_rounds: int, workers: int = 4) -> list[float]:
    """Has one thread hang: how many closures the others do then, beside as many before."""
    is_free, num_done = threading.Event(), collections.Counter[int]()
    is_free.set()

    def fault(point: str, worker: int, closure: int) -> None:
        if point == "pull":
            time.sleep(_CLOSURE_SECONDS)
            if worker == 0:
                is_free.wait()
        elif point == "after_push":
            num_done[worker] += 1

    strategy = HandMade(workers=workers, servers=2, fault=fault)
    for server, key in enumerate("ab"):
        strategy.engine.servers[server].create(key, np.int32(0))
    plan = two_counters(np.int32)

    def rate_of_others(coordinator: dj.Coordinator) -> float:
        num_done.clear()
        began = time.monotonic()
        for _ in range(_CLOSURES_OF_A_ROUND):  # as many as find room: one hangs, and may have two
            coordinator.schedule(plan, (np.int32(1),))
        num_others = sum(num_done[worker] for worker in range(1, workers))
        return num_others / (time.monotonic() - began)

    rates = []
    with dj.Coordinator(strategy) as coordinator:
        for _ in range(num_rounds):
            before = rate_of_others(coordinator)
            coordinator.join()
            is_free.clear()
            meanwhile = rate_of_others(coordinator)
            is_free.set()
            coordinator.join()
            rates.append(meanwhile / before)
    return rates


class WatchedEngine(dj.servers.RayEngine):
    """Remembers when each worker was sent its closures."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[int, list[float]] = collections.defaultdict(list)

    def run(self, worker, task):
        """Runs a closure."""
        self.moments[worker].append(time.monotonic())
        return super().run(worker, task)


class Gap(NamedTuple):
    """The longest time for which another worker got no closure while one was dead.

    Attributes:
      seconds: of it.
      bound: three of the worker's median closures, and what the new process has computed.
    """

    seconds: float
    bound: float


def gaps_beside_dead_processes(strategy, engine, schedule, rng, num_kills) -> list[Gap]:
    """Kills workers one after the other while closures run."""
    gaps: list[Gap] = []
    killed: list[int] = []
    with dj.Coordinator(strategy) as coordinator:
        while not all(w["closures"] > 10 * _IN_HAND for w in coordinator.stats()["workers"]):
            schedule(coordinator)
        while len(killed) < num_kills:
            pids = _pids(coordinator)
            began = time.monotonic()
            assert kill_a_worker(coordinator, rng, killed), "all have started"
            dead = next(worker for worker, pid in pids.items() if pid == killed[-1])
            while _pids(coordinator)[dead] in (None, killed[-1]):
                schedule(coordinator)
            cpu = sum(psutil.Process(_pids(coordinator)[dead]).cpu_times()[:2])
            for _ in range(rng.randrange(10, 30)):  # or the next one would be found as it starts
                schedule(coordinator)
            gaps += [_longest_gap(m, began, cpu) for w, m in engine.moments.items() if w != dead]
        coordinator.join()
    return gaps


def _pids(coordinator: dj.Coordinator) -> dict[int, int | None]:
    return {worker["id"]: worker["pid"] for worker in coordinator.stats()["workers"]}


def _longest_gap(moments: list[float], began: float, cpu_seconds: float) -> Gap:
    pairs = list(itertools.pairwise(moments))
    since = [later - earlier for earlier, later in pairs if later > began]
    before = [later - earlier for earlier, later in pairs if later <= began]
    return Gap(max(since), 3 * statistics.median(before) + cpu_seconds)
