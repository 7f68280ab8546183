"""Sinks for summaries: JSON lines, and TensorBoard event files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from distjax.errors import message

#: The names of a record's own numbers, which no value may have.
RESERVED = ("time", "step")


class Sink(Protocol):
    """Receives the summaries of one process."""

    def add(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Writes the values of one step; `seconds` is the Unix time."""
        ...

    def close(self) -> None:
        """Flushes and closes the files."""
        ...


class JsonLines:
    """A file with one JSON object per line: time, step, and the values.

    Args:
      path: the file; lines are appended, its directories are created.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def add(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Adds a line."""
        # NaN and infinity are not valid JSON: a loss that blew up is written as a string.
        exact = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        line = json.dumps({"time": seconds, "step": step, **exact})
        self._file.write(line + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """TensorBoard event files, written by tensorboardX.

    Args:
      directory: the run's directory, shown by `tensorboard --logdir`.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    def __init__(self, directory: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                message(
                    "TensorBoard event files need the package tensorboardX",
                    got="no such package",
                    why="it is an optional part of distjax",
                    fix="pip install 'distjax[diagnostics]'; formats=('jsonl',) needs nothing",
                )
            ) from error
        self._writer = SummaryWriter(str(directory))

    def add(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Adds a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)

    def close(self) -> None:
        """Flushes and closes the files."""
        self._writer.close()


#: Maps each format of a SummaryWriter to the constructor of its sink, in the order in which they
#: are made: without its package, TensorBoard fails before a file is there.
FORMATS = {
    "tensorboard": TensorBoard,
    "jsonl": lambda directory: JsonLines(directory / "summaries.jsonl"),
}
