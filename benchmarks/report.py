"""What a benchmark is, and the record it leaves: a table and a JSON file."""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import platform
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.table import format_table

_PACKAGES = ("distjax", "jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One question, the function that answers it, and how its table looks.

    Attributes:
      name: What the command line and the JSON file call it.
      title: The line above the table.
      columns: The keys of the rows that the table shows.
      run: Returns the rows; its argument asks for fewer sizes, rounds and calls.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    run: Callable[[bool], list[dict[str, Any]]]


def environment() -> dict[str, Any]:
    """The devices and the versions with which the figures are measured."""
    devices = jax.devices()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "num_devices": len(devices),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def report(benchmark: Benchmark, rows: list[dict[str, Any]]) -> str:
    """The title, the environment in one line, and the table."""
    where = environment()
    versions = where["versions"]
    line = (
        f"{where['num_devices']} x {where['device']}, JAX {versions['jax']}, "
        f"Python {where['python']}"
    )
    table = format_table(rows, benchmark.columns)
    return f"{benchmark.title}\n{line}\n\n{table}\n"


def write(
    benchmark: Benchmark,
    rows: list[dict[str, Any]],
    directory: pathlib.Path,
    quick: bool,
) -> pathlib.Path:
    """Writes `<directory>/<name>.json` and returns its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{benchmark.name}.json"
    record = {
        "benchmark": benchmark.name,
        "title": benchmark.title,
        "quick": quick,
        "environment": environment(),
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None  # run from a checkout that is not installed
