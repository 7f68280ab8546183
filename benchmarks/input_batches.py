"""Batches on their way to the replicas, beside `device_put` with the same sharding."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks import handwritten
from benchmarks.models import REPLICA_AXIS
from benchmarks.report import Benchmark
from benchmarks.timing import Call, interleave, loop_seconds, medians

#: Examples per replica and numbers per example: batches of a few KiB and of some MiB.
SIZES = {"small": (4, 64), "large": (64, 3072)}
PREFETCH = 2
_LOOP_BYTES = 2**27
_LOOP_BATCHES = 200


def _source(num_replicas: int, size: str) -> Iterator[dict[str, np.ndarray]]:
    """Batches without end, of images and labels, made before the clock starts."""
    num_examples, width = SIZES[size]
    rng = np.random.default_rng(0)
    shape = (num_replicas * num_examples, width)
    return itertools.cycle(
        {
            "image": rng.normal(size=shape).astype(np.float32),
            "label": rng.integers(0, 10, shape[0]).astype(np.int32),
        }
        for _ in range(8)
    )


def _next_by_hand(devices: list[jax.Device], size: str, prefetch: int) -> Callable[[], Any]:
    """`device_put` in the loop, or on a thread that runs `prefetch` batches ahead."""
    sharding = NamedSharding(handwritten.make_mesh(devices), P(REPLICA_AXIS))
    source = _source(len(devices), size)
    if not prefetch:
        return lambda: jax.device_put(next(source), sharding)
    moved: queue.Queue[Any] = queue.Queue(prefetch)

    def work() -> None:
        for batch in source:
            moved.put(jax.device_put(batch, sharding))

    threading.Thread(target=work, daemon=True).start()
    return moved.get


def _next_ours(
    devices: list[jax.Device], size: str, prefetch: int, copy: bool
) -> Callable[[], Any]:
    strategy = dj.MirroredStrategy(devices)
    options = dj.InputOptions(prefetch=prefetch, copy=copy)
    return iter(strategy.distribute_dataset(_source(len(devices), size), options)).get_next


def _loop(next_batch: Callable[[], Any]) -> Call:
    """A step that reads the whole batch, and nothing else, on all devices."""
    read = jax.jit(lambda batch: jax.tree.map(jnp.sum, batch))
    return lambda: read(jax.tree.leaves(next_batch()))


def _row(
    devices: list[jax.Device], size: str, prefetch: int, copy: bool, num_pairs: int
) -> dict[str, Any]:
    ours = _loop(_next_ours(devices, size, prefetch, copy))
    theirs = _loop(_next_by_hand(devices, size, prefetch))
    num_examples, width = SIZES[size]
    num_bytes = len(devices) * num_examples * (width + 1) * 4
    num_calls = min(_LOOP_BATCHES, _LOOP_BYTES // num_bytes)
    for call in (ours, theirs):
        loop_seconds(call, 10, await_every=1)
    found = medians(
        interleave(
            lambda: loop_seconds(ours, num_calls, await_every=10),
            lambda: loop_seconds(theirs, num_calls, await_every=10),
            num_pairs,
        )
    )
    return {
        "replicas": len(devices),
        "batch": size,
        "KiB": num_bytes / 1024,
        "moved": "by a thread" if prefetch else "in the loop",
        "copied": "yes" if copy else "no",
        "ours us": found.ours_seconds * 1e6,
        "by hand us": found.baseline_seconds * 1e6,
        "ratio": found.ratio,
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for R = 1, and for R = 8 or as many devices as there are."""
    return [
        _row(jax.devices()[:r], size, prefetch, copy, 4 if quick else 16)
        for r in sorted({1, min(8, jax.device_count())})
        for size in SIZES
        for prefetch in (0, PREFETCH)
        for copy in (True, False)
    ]


BENCHMARK = Benchmark(
    name="input_batches",
    title="Batches moved to the replicas, and read by a step",
    columns=("replicas", "batch", "KiB", "moved", "copied", "ours us", "by hand us", "ratio"),
    run=run,
)
