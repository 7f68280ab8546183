"""Measurements in a process of their own, with a number of virtual CPU devices."""

import json
import os
import subprocess
import sys
from typing import Any


def run_worker(module: str, options: dict[str, Any], num_devices: int) -> Any:
    """What ``python -m benchmarks.<module>`` prints last, as JSON.

    Args:
      module: The worker.
      options: Its command line.
      num_devices: How many devices it has, on the CPU.

    Raises:
      RuntimeError: If the process fails; the message holds what it wrote.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}"]
    command += [f"--{name}={value}" for name, value in options.items()]
    settings = {
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        # The process shares any GPU with this one, which has preallocated its part.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    finished = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(
            f"{' '.join(command)} with {num_devices} devices failed:\n{finished.stderr}"
        )
    return json.loads(finished.stdout.splitlines()[-1])
