"""Steps by workers of parameter servers, beside TensorFlow's ParameterServerStrategy.

TensorFlow runs in a process of its own, with the Python that TENSORFLOW_PYTHON names. The two sides
take turns, and each is idle during the other's. Where our workers are threads, all of TensorFlow's
cluster is in that process; where ours are Ray processes, each of its workers and servers is one.
"""

import contextlib
import importlib.util
import os
import pathlib
import statistics
import subprocess
import threading
from collections.abc import Callable, Generator
from typing import Any

import distjax as dj
from benchmarks.report import Benchmark
from benchmarks.servers import NUM_WORKERS, batch_of, make_step, step_seconds
from benchmarks.timing import interleave

_PYTHON = os.environ.get("TENSORFLOW_PYTHON", ".venv-golden/bin/python")
#: Hidden units, examples of a batch, steps of a timed run.
SIZES = ((64, 32, 200), (512, 128, 60))
#: Floor and goal of the ratio for each size, by whether workers are processes.
BARS = {False: ((3.0, 4.0), (2.0, 2.5)), True: ((0.8, 1.0), (1.1, 1.3))}
NUM_PROCESSES = 2  # workers, where they are processes
_WARM_UP_STEPS = 20
_ANSWER_SECONDS = 300  # a cluster that does not come up waits forever


@contextlib.contextmanager
def tensorflow(
    num_workers: int, hidden: int, examples: int, *, are_apart: bool
) -> Generator[Callable[[int], float]]:
    """Starts TensorFlow; yields a function from a number of steps to the seconds per step."""
    command = [_PYTHON, "-m", "benchmarks.servers_tensorflow_worker"]
    numbers = map(str, (num_workers, hidden, examples, int(are_apart)))
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, *numbers], stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def run(num_steps: int) -> float:
        clock = threading.Timer(_ANSWER_SECONDS, process.kill)
        clock.start()
        print(num_steps, file=asked, flush=True)
        answer = answers.readline()
        clock.cancel()
        if not answer:
            raise RuntimeError(f"TensorFlow ended, or gave no answer in {_ANSWER_SECONDS} s")
        return float(answer)

    try:
        yield run
    finally:
        process.kill()
        process.communicate()


def measure(
    num_workers: int,
    size: tuple[int, int, int],
    bars: tuple[float, float],
    num_pairs: int,
    *,
    are_apart: bool,
) -> dict[str, Any]:
    """One row: steps per second of both sides, and their ratio."""
    hidden, examples, num_steps = size
    floor, goal = bars
    batch = batch_of(examples)
    engine = dj.servers.RayEngine() if are_apart else dj.servers.ThreadEngine()
    strategy = dj.ParameterServerStrategy(workers=num_workers, engine=engine)
    step = make_step(strategy, hidden)
    theirs = tensorflow(num_workers, hidden, examples, are_apart=are_apart)
    with dj.Coordinator(strategy) as coordinator, theirs as run_theirs:
        run_ours = lambda count: step_seconds(coordinator, step, batch, count)
        for run in (run_ours, run_theirs):
            run(_WARM_UP_STEPS * num_workers)
        pairs = interleave(lambda: run_ours(num_steps), lambda: run_theirs(num_steps), num_pairs)
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    return {
        "workers are": "processes" if are_apart else "threads",
        "hidden": hidden,
        "workers": num_workers,
        "ours steps/s": statistics.median(1 / ours for ours, _ in pairs),
        "TensorFlow steps/s": statistics.median(1 / theirs for _, theirs in pairs),
        "ratio": ratio,
        "least": min(theirs / ours for ours, theirs in pairs),
        "floor": floor,
        "goal": goal,
        "reached": "goal" if ratio >= goal else "floor" if ratio >= floor else "no",
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for each size and number of workers; quick takes one size and fewer numbers."""
    if not pathlib.Path(_PYTHON).exists():
        return [{"reached": f"left out: no {_PYTHON} (make golden, or TENSORFLOW_PYTHON=...)"}]
    threads = NUM_WORKERS[:2] if quick else NUM_WORKERS
    kinds = [(False, n) for n in threads]
    if importlib.util.find_spec("ray") is not None:
        kinds.append((True, NUM_PROCESSES))
    return [
        measure(num_workers, size, bars, 2 if quick else 6, are_apart=are_apart)
        for are_apart, num_workers in kinds
        for size, bars in zip(SIZES[:1] if quick else SIZES, BARS[are_apart], strict=False)
    ]


BENCHMARK = Benchmark(
    name="servers_tensorflow",
    title="Steps by workers of a parameter server, beside TensorFlow's (ratio: ours to theirs)",
    columns=(
        "workers are",
        "hidden",
        "workers",
        "ours steps/s",
        "TensorFlow steps/s",
        "ratio",
        "least",
        "floor",
        "goal",
        "reached",
    ),
    run=run,
)
