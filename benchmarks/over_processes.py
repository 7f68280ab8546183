"""Steps per second over several processes of one machine, beside `shard_map` by hand."""

import json
import os
import socket
import subprocess
import sys
from typing import Any

from benchmarks.report import Benchmark

SHAPES = ((2, 1), (2, 2))
_SECONDS = 900


def measure(num_processes: int, num_devices: int, num_pairs: int) -> list[dict[str, Any]]:
    """The rows of one shape, measured in fresh processes.

    Raises:
      RuntimeError: If a process fails; the message holds what it wrote.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{found.getsockname()[1]}"
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "DISTJAX_COORDINATOR": address,
        "DISTJAX_NUM_PROCESSES": str(num_processes),
    }
    command = [sys.executable, "-m", "benchmarks.over_processes_worker", f"--pairs={num_pairs}"]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | settings | {"DISTJAX_PROCESS_ID": str(i)},
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for i in range(num_processes)
    ]
    try:
        outputs = [process.communicate(timeout=_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors}")
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("[{")]
    return json.loads(lines[-1])


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows for each shape; quick takes 6 rounds, not 30."""
    return [row for shape in SHAPES for row in measure(*shape, 6 if quick else 30)]


BENCHMARK = Benchmark(
    name="over_processes",
    title="Steps per second over processes, ratio to shard_map by hand in the same processes",
    columns=(
        "processes",
        "devices",
        "state",
        "step ms",
        "hand-written ms",
        "ratio",
        "spread",
        "bar",
        "within bar",
    ),
    run=run,
)
