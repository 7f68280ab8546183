"""What does the first call of a step with many small arrays of state take, in a new process?"""

import functools
from typing import Any

import jax

from benchmarks.first_call_worker import FORMS, HAND_WRITTEN
from benchmarks.report import Benchmark
from benchmarks.timing import interleave, medians
from benchmarks.worker import run_worker

REPLICA_COUNTS = (1, 8)
BAR = 1.5


def _row(form: str, num_replicas: int, num_leaves: int, num_pairs: int) -> dict[str, Any]:
    def seconds(form: str) -> float:
        options = {"form": form, "leaves": num_leaves}
        return run_worker("first_call_worker", options, num_replicas)

    ours, by_hand = (functools.partial(seconds, f) for f in (form, HAND_WRITTEN))
    found = medians(interleave(ours, by_hand, num_pairs))
    return {
        "replicas": num_replicas,
        "leaves": num_leaves,
        "state": form,
        "ours s": found.ours_seconds,
        "hand-written s": found.baseline_seconds,
        "ratio": found.ratio,
        "bar": BAR,
        "within bar": found.ratio <= BAR,
    }


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for R = 1 and 8; on accelerators only for the number of devices."""
    counts = REPLICA_COUNTS if jax.default_backend() == "cpu" else (jax.device_count(),)
    num_leaves, num_pairs = (200, 2) if quick else (2000, 4)
    forms = [form for form in FORMS if form != HAND_WRITTEN]
    return [_row(form, r, num_leaves, num_pairs) for r in counts for form in forms]


BENCHMARK = Benchmark(
    name="first_call",
    title="First call of a step with many small arrays of state, in a new process",
    columns=(
        "replicas",
        "leaves",
        "state",
        "ours s",
        "hand-written s",
        "ratio",
        "bar",
        "within bar",
    ),
    run=run,
)
