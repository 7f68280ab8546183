"""Parameter servers under faults: python -m tests.drills.servers [--seed 0] [--part 1.0].

Prints a table; the end is 1 where a law does not hold.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import pathlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")

import hypothesis
import jax
import numpy as np

import distjax as dj
from tests.drills.dead_workers import rates_beside_a_hanging_thread
from tests.servers.faults import run_with_faults
from tests.servers.replay import run_recorded
from tests.servers.staleness import run_random_schedule
from tests.servers.test_random_steps import DRAWN, check_one_step

SCHEDULES, STEPS, REPLAYS, FAULTS, HANGS, EPOCHS = 10_000, 1_000, 1_000, 1_000, 30, 20
LEAST_RATE = 0.9  # of the workers beside one that hangs
CLOSURES_OF_A_RUN = 300
EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "digits"


def keep_the_bound(seed: int, count: int) -> tuple[str, bool]:
    """Random schedules through the gate: never over the bound, none stuck."""
    num_over = num_pushes = 0
    for i in range(count):
        bound, staleness = run_random_schedule(random.Random(seed + i))
        num_pushes += len(staleness)
        num_over += max(staleness, default=0) > bound
    return f"{count} schedules, {num_pushes} pushes, {num_over} over the bound", not num_over


def equal_one_device(seed: int, count: int) -> tuple[str, bool]:
    """Random steps, one at a time, whole or cut, are those of one device, or of replicas."""
    num_steps = 0

    def check(**drawn) -> None:
        nonlocal num_steps
        check_one_step(**drawn)
        num_steps += 1

    drawn = hypothesis.seed(seed)(hypothesis.given(**DRAWN)(check))
    how = {"max_examples": count, "deadline": None, "database": None}
    try:
        hypothesis.settings(**how, suppress_health_check=list(hypothesis.HealthCheck))(drawn)()
    except AssertionError as error:
        return f"{num_steps} random steps, then {error}", False
    return f"{num_steps} random steps, 0 different", True


def equal_their_replay(seed: int, count: int) -> tuple[str, bool]:
    """Asynchronous runs, and again in the order of each server's versions."""
    num_different = 0
    for i in range(count):
        final, again = run_recorded(seed + i)
        num_different += not all(map(np.array_equal, final, again))
    return f"{count} runs, {num_different} different", not num_different


def apply_each_once(seed: int, count: int) -> tuple[str, bool]:
    """Workers die in closures of several servers and stages, with and without a bound."""
    num_faults = num_runs = num_wrong = 0
    while num_faults < count:
        bound = (None, 0, 2)[num_runs % 3]
        found = run_with_faults(
            seed + num_runs, num_closures=CLOSURES_OF_A_RUN, max_staleness=bound
        )
        is_exact = found["applied"] == found["expected"] and found["sum"][0] == found["sum"][1]
        is_fresh = bound is None or found["worst"] <= bound
        num_wrong += not (is_exact and is_fresh and not found["kept"])
        num_faults, num_runs = num_faults + found["faults"], num_runs + 1
    closures = num_runs * CLOSURES_OF_A_RUN
    return f"{closures} closures, {num_faults} faults, {num_wrong} wrong runs", not num_wrong


def wait_for_nobody(seed: int, count: int) -> tuple[str, bool]:
    """One of four workers hangs: the others are as fast as before."""
    rate = statistics.median(rates_beside_a_hanging_thread(count))
    return f"{count} times: the others' rate {rate:.2f} of what it was before", rate >= LEAST_RATE


def train_digits(strategy, seed, num_epochs, halfway=lambda coordinator: None):
    """Returns the accuracy of the digits example, its stats and the number of steps."""
    sys.path.insert(0, str(EXAMPLE))
    data, model, train = map(importlib.import_module, ("data", "model", "train"))
    training, test = data.load()
    num_steps = num_epochs * data.steps_per_epoch(training, 64)
    with strategy.scope():
        network = model.ConvNet(axis_name=strategy.axis_name)
        initial = model.initialize(network, training.images, seed)
        trainer = train.Trainer(network, model.make_optimizer(num_steps), initial)
    with dj.Coordinator(strategy) as coordinator:
        batches = itertools.islice(data.train_batches(training, 64, seed), num_steps)
        for number, batch in enumerate(batches):
            coordinator.schedule(trainer.train_step, args=(batch.images, batch.labels))
            if number == num_steps // 2:
                halfway(coordinator)
        coordinator.join()
        stats = coordinator.stats()
        for batch in data.test_batches(test, 64):
            coordinator.schedule(trainer.test_step, args=(batch.images, batch.labels))
    return trainer.test_accuracy.result(), stats, num_steps


def judge_digits(num_workers, accuracy, stats, num_steps):
    """Returns a text, and whether it was learned, by all workers, one of which was lost."""
    mean = sum(k * n for k, n in stats["staleness"].items()) / num_steps
    is_shared = num_workers == 1 or (mean > 0 and all(w["closures"] for w in stats["workers"]))
    is_killed = sum(w["restarts"] for w in stats["workers"]) == 1
    text = f"{num_workers} workers {accuracy:.2%}, mean staleness {mean:.2f}"
    return text, accuracy >= 0.98 and is_shared and is_killed


def learn_digits(seed: int, num_epochs: int) -> tuple[str, bool]:
    """The digits example by 1, 2 and 4 workers, one of which is killed in the middle."""
    results = []
    for workers in (1, 2, 4):
        killed: list[int] = []

        def kill(point: str, worker: int, closure: int, killed: list[int] = killed) -> None:
            if point == "after_push" and closure >= 10 * num_epochs and not killed:
                killed.append(closure)
                raise dj.servers.WorkerDied

        engine = dj.servers.ThreadEngine(fault=kill)
        strategy = dj.ParameterServerStrategy(workers=workers, engine=engine)
        results.append(judge_digits(workers, *train_digits(strategy, seed, num_epochs)))
    return "; ".join(text for text, _ in results), all(is_well for _, is_well in results)


#: (seed, count) -> a text, and whether it holds.
Law = Callable[[int, int], tuple[str, bool]]
LAWS: dict[Law, int] = {
    keep_the_bound: SCHEDULES,
    equal_one_device: STEPS,
    equal_their_replay: REPLAYS,
    apply_each_once: FAULTS,
    wait_for_nobody: HANGS,
    learn_digits: EPOCHS,
}


def main(laws: Mapping[Law, int] = LAWS, program: str = "servers") -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.drills.{program}")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (0)")
    parser.add_argument("--part", type=float, default=1.0, help="of the full counts (1.0)")
    options = parser.parse_args()
    do_all_hold = True
    with tempfile.TemporaryDirectory(prefix="distjax-drills-") as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for law, count in laws.items():
            began = time.monotonic()
            text, holds = law(options.seed, max(1, int(count * options.part)))
            seconds = time.monotonic() - began
            result = "holds" if holds else "FAILED"
            print(f"{law.__name__:20} {result:7} {seconds:6.0f} s  {text}", flush=True)
            do_all_hold &= holds
    sys.exit(not do_all_hold)


if __name__ == "__main__":
    main()
