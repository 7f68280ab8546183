"""How long does a step take to trace, lower and compile, and does R matter?"""

from typing import Any

import jax

from benchmarks.report import Benchmark
from benchmarks.worker import run_worker

REPLICA_COUNTS = (1, 8, 64, 512)


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for each number of replicas; on accelerators only for the number of devices."""
    counts = REPLICA_COUNTS
    if jax.default_backend() != "cpu":
        counts = (jax.device_count(),)
    elif quick:
        counts = REPLICA_COUNTS[:2]
    options = {"layers": 2, "pairs": 2} if quick else {"layers": 8, "pairs": 6}
    rows: list[dict[str, Any]] = []
    for num_replicas in counts:
        rows += run_worker("compile_worker", options, num_replicas)
    return [row | {"vs least R": _against_first(row, rows)} for row in rows]


def _against_first(row: dict[str, Any], rows: list[dict[str, Any]]) -> float:
    first = next(other for other in rows if other["state"] == row["state"])
    return row["ours s"] / first["ours s"]


BENCHMARK = Benchmark(
    name="compile_time",
    title="Trace + lower + compile of a transformer step, against hand-written",
    columns=(
        "replicas",
        "state",
        "ours s",
        "hand-written s",
        "vs least R",
        "trace + lower ratio",
        "ratio",
        "bar",
        "within bar",
    ),
    run=run,
)
