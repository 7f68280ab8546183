"""`distjax info`: what to paste into a report of a bug."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import socket
import sys
from collections.abc import Sequence
from typing import Any

from distjax._src.tables import Table, as_text

_PACKAGES = ("distjax", "jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint", "numpy")
_VARIABLES = re.compile(
    "(JAX|XLA|TPU|DISTJAX|NCCL|SLURM|CUDA_VISIBLE|OMPI_COMM|PYTHONHASHSEED|TF_CONFIG|LIBTPU)"
)
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def describe() -> dict[str, Any]:
    """Returns versions, machine, devices and the variables that matter, as JSON values."""
    import jax

    import distjax

    found: dict[str, Any] = {"Python": f"{platform.python_version()} ({sys.executable})"}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["distjax"] = distjax.__version__  # of the code that runs, also in an edited clone
    found["system"] = platform.platform()
    found["host"] = socket.gethostname()
    available, total = memory()
    found["processors"] = str(os.cpu_count())
    found["memory"] = f"{available:.1f} of {total:.1f} GiB are available"
    try:
        kinds = [f"{device.platform}:{device.device_kind}" for device in jax.devices()]
        found["devices"] = ", ".join(f"{kinds.count(k)} {k}" for k in dict.fromkeys(kinds))
    except RuntimeError as error:
        found["devices"] = f"none: {str(error).splitlines()[0]}"
    names = sorted(name for name in os.environ if _VARIABLES.match(name))
    shown = {name: "..." if _SECRET.search(name) else os.environ[name] for name in names}
    return found | {"variables": shown}


def memory() -> tuple[float, float]:
    """Returns how many GiB of memory are available, and how many there are; NaN if unknown."""
    try:
        with open("/proc/meminfo") as file:
            kib = {line.split(":")[0]: int(line.split()[1]) for line in file}
        return kib["MemAvailable"] / 2**20, kib["MemTotal"] / 2**20
    except (OSError, KeyError, ValueError):
        return float("nan"), float("nan")


def main(argv: Sequence[str]) -> int:
    """Runs `distjax info` with these arguments, and returns its exit code."""
    parser = argparse.ArgumentParser(prog="distjax info", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json, found = parser.parse_args(argv).json, describe()
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    variables = found.pop("variables")
    tables = [("Installation:", found), *([("Variables:", variables)] if variables else [])]
    print(as_text([Table(caption, (), (*rows.items(),)) for caption, rows in tables]))
    return 0
