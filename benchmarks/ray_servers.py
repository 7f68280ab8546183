"""Steps by workers that are Ray processes, and a pull beside a bare `ray.get`."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj
from benchmarks.report import Benchmark
from benchmarks.servers import SIZES, batch_of, make_step, step_seconds, warm_up
from benchmarks.timing import interleave, loop_seconds

NUM_WORKERS = 2
_ARRAYS, _ARRAY_BYTES = 4, 25 << 20


class Holder:
    """A process that holds arrays, without distjax."""

    def __init__(self) -> None:
        self._arrays = [np.ones(_ARRAY_BYTES // 4, np.float32) for _ in range(_ARRAYS)]

    def read(self) -> list[np.ndarray]:
        """Returns the arrays."""
        return self._arrays


def measure_steps(size: tuple[int, int, int], num_pairs: int) -> dict[str, Any]:
    """One row: microseconds per step, of two workers and of one device."""
    hidden, examples, num_steps = size
    batch = batch_of(examples)
    alone = dj.OneDeviceStrategy()
    own_step = make_step(alone, hidden)
    served = dj.ParameterServerStrategy(NUM_WORKERS, engine=dj.servers.RayEngine())
    step = make_step(served, hidden)
    with dj.Coordinator(served) as coordinator:
        run = lambda count: step_seconds(coordinator, step, batch, count)
        call = lambda: alone.run(own_step, args=batch)
        warm_up(run, call, NUM_WORKERS)
        pairs = interleave(lambda: run(num_steps), lambda: loop_seconds(call, num_steps), num_pairs)
    return _row(f"step 784-{hidden}-{hidden}-10, one device", pairs)


def measure_pull(num_pairs: int) -> dict[str, Any]:
    """One row: microseconds per pull of 100 MB, into JAX and, with Ray alone, into numpy."""
    import ray

    strategy = dj.ParameterServerStrategy(1, engine=dj.servers.RayEngine())
    with strategy.scope():
        variables = [dj.Variable(jnp.ones(_ARRAY_BYTES // 4)) for _ in range(_ARRAYS)]
    keys = [part.key for v in variables for part in v.stored.parts]
    holder = ray.remote(num_cpus=0)(Holder).remote()
    pull = lambda: jax.block_until_ready(strategy.servers[0].read(keys))
    bare = lambda: ray.get(holder.read.remote())
    loop_seconds(pull, 2), loop_seconds(bare, 2)
    pairs = interleave(lambda: loop_seconds(pull, 2), lambda: loop_seconds(bare, 2), num_pairs)
    return _row("pull of 100 MB, ray.get", pairs)


def _row(what: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    return {
        "what, beside": what,
        "us": statistics.median(ours for ours, _ in pairs) * 1e6,
        "beside us": statistics.median(theirs for _, theirs in pairs) * 1e6,
        "rate": statistics.median(theirs / ours for ours, theirs in pairs),
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """A row for each size of the step, and one for a pull."""
    sizes = SIZES[:1] if quick else SIZES
    num_pairs, num_pulls = (2, 6) if quick else (6, 40)
    return [*(measure_steps(size, num_pairs) for size in sizes), measure_pull(num_pulls)]


BENCHMARK = Benchmark(
    name="ray_servers",
    title=f"Steps by {NUM_WORKERS} workers of Ray's, and a pull (rate: theirs to ours)",
    columns=("what, beside", "us", "beside us", "rate"),
    run=run,
)
