"""How long does a step take to trace, lower and compile, and does R matter?"""

import json
import os
import subprocess
import sys
from typing import Any

import jax

from benchmarks.report import Benchmark

REPLICA_COUNTS = (1, 8, 64, 512)


def measure(num_replicas: int, num_layers: int, num_pairs: int) -> list[dict[str, Any]]:
    """The rows for one number of replicas, measured in a fresh process.

    Raises:
      RuntimeError: If the process fails; the message holds what it wrote.
    """
    command = [sys.executable, "-m", "benchmarks.compile_worker"]
    command += [f"--layers={num_layers}", f"--pairs={num_pairs}"]
    settings = {
        "JAX_NUM_CPU_DEVICES": str(num_replicas),
        # The process shares any GPU with this one, which has preallocated its part.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    finished = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(
            f"{' '.join(command)} with {num_replicas} replicas failed:\n{finished.stderr}"
        )
    return json.loads(finished.stdout.splitlines()[-1])


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for each number of replicas; on accelerators only for the number of devices."""
    counts = REPLICA_COUNTS
    if jax.default_backend() != "cpu":
        counts = (jax.device_count(),)
    elif quick:
        counts = REPLICA_COUNTS[:2]
    num_layers, num_pairs = (2, 2) if quick else (8, 6)
    rows: list[dict[str, Any]] = []
    for num_replicas in counts:
        rows += measure(num_replicas, num_layers, num_pairs)
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
