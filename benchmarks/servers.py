"""Steps of an MLP by workers of parameter servers, beside the same step on one device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import distjax as dj
from benchmarks.report import Benchmark
from benchmarks.timing import interleave, loop_seconds

#: Hidden units, examples of a batch, steps of a timed run.
SIZES = ((64, 32, 600), (512, 128, 100))
NUM_WORKERS = (1, 2, 4)
_INPUTS, _CLASSES = 784, 10
_WARM_UP_STEPS = 20
_SCHEDULED, _QUEUED = 125, 4


def make_step(strategy: dj.Strategy, hidden: int) -> Callable[[Any, Any], Any]:
    """A step of an MLP 784-h-h-10 with Adam, its state in variables of a strategy."""
    sizes = (_INPUTS, hidden, hidden, _CLASSES)
    rng = np.random.default_rng(0)
    shapes = list(zip(sizes[:-1], sizes[1:], strict=True))
    with strategy.scope():
        weights = [dj.Variable(jnp.asarray(rng.normal(0, 0.05, s), jnp.float32)) for s in shapes]
        biases = [dj.Variable(jnp.zeros(width)) for width in sizes[1:]]
        optimizer = dj.optim.Optimizer(optax.adam(1e-3))
        optimizer.init([*weights, *biases])
    variables = [*weights, *biases]

    def loss_fn(params: list[Any], images: Any, labels: Any) -> Any:
        x = images
        for i in range(len(shapes)):
            x = x @ params[i] + params[len(shapes) + i]
            x = jnp.tanh(x) if i < len(shapes) - 1 else x
        return optax.softmax_cross_entropy_with_integer_labels(x, labels).mean()

    def step(images: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)([v.value for v in variables], images, labels)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def batch_of(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random examples with labels."""
    rng = np.random.default_rng(1)
    images = rng.normal(size=(size, _INPUTS)).astype(np.float32)
    return images, rng.integers(0, _CLASSES, size).astype(np.int32)


def step_seconds(
    coordinator: dj.Coordinator, step: Callable[[Any, Any], Any], batch: Any, count: int
) -> float:
    """The seconds per step of `count` steps scheduled one after the other."""
    start = time.perf_counter()
    for _ in range(count):
        coordinator.schedule(step, args=batch)
    coordinator.join()
    return (time.perf_counter() - start) / count


def warm_up(run: Callable[[int], float], call: Callable[[], object], num_workers: int) -> None:
    """Has every worker, and one device, compile the step."""
    run(_WARM_UP_STEPS * num_workers)
    loop_seconds(call, _WARM_UP_STEPS)


def measure(num_workers: int, size: tuple[int, int, int], num_pairs: int) -> dict[str, Any]:
    """One row: microseconds per step, and per call of `schedule` that need not wait."""
    hidden, examples, num_steps = size
    batch = batch_of(examples)
    alone = dj.OneDeviceStrategy()
    own_step = make_step(alone, hidden)
    served = dj.ParameterServerStrategy(workers=num_workers)
    step = make_step(served, hidden)
    with dj.Coordinator(served) as coordinator:
        run = lambda count: step_seconds(coordinator, step, batch, count)
        call = lambda: alone.run(own_step, args=batch)
        warm_up(run, call, num_workers)
        pairs = interleave(lambda: run(num_steps), lambda: loop_seconds(call, num_steps), num_pairs)
        staleness = coordinator.stats()["staleness"]
    return {
        "hidden": hidden,
        "workers": num_workers,
        "step us": statistics.median(ours for ours, _ in pairs) * 1e6,
        "one device us": statistics.median(theirs for _, theirs in pairs) * 1e6,
        "rate": statistics.median(theirs / ours for ours, theirs in pairs),
        "staleness": sum(k * n for k, n in staleness.items()) / sum(staleness.values()),
        "schedule us": _schedule_seconds(served, step, batch) * 1e6,
    }


def _schedule_seconds(
    strategy: dj.ParameterServerStrategy, step: Callable[[Any, Any], Any], batch: Any
) -> float:
    """The median time of calls that need not wait; they fill the queue again and again.

    A longer queue would copy batches to memory that is new to the process, 10 times as slowly.
    """
    seconds = []
    with dj.Coordinator(strategy) as coordinator:
        for _ in range(_SCHEDULED):
            with coordinator.paused():
                for _ in range(_QUEUED):
                    start = time.perf_counter()
                    coordinator.schedule(step, args=batch)
                    seconds.append(time.perf_counter() - start)
                coordinator.cancel()
    return statistics.median(seconds)


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for each size and number of workers; quick takes one size and two numbers."""
    sizes, numbers = (SIZES[:1], NUM_WORKERS[:2]) if quick else (SIZES, NUM_WORKERS)
    return [measure(n, size, 2 if quick else 6) for size in sizes for n in numbers]


BENCHMARK = Benchmark(
    name="servers",
    title="Steps by workers of a parameter server, beside one device (rate: of ours to its own)",
    columns=(
        "hidden",
        "workers",
        "step us",
        "one device us",
        "rate",
        "staleness",
        "schedule us",
    ),
    run=run,
)
