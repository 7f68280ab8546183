"""Summaries: scalars of a training run, written by one process.

A writer may be called anywhere. Outside traces it writes at once. In a replica function
and in `dj.jit` it stages a callback, which writes when the program runs, and only on
replica 0. An error there would cost the variables that the program writes their values: it is
kept, and raised by the next call of the writer.
"""

from __future__ import annotations

import importlib.util
import json
import math
import threading
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import jax_compat
from distjax._src.context import frames
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable
from distjax.errors import describe_value, message, require


def is_first_process() -> bool:
    """Returns whether this process writes summaries and shows progress."""
    return jax.process_index() == 0


def progress(iterable: Iterable[Any], **options: PyTree) -> Iterable[Any]:
    """Returns `iterable` with a progress bar on the first process.

    The bar is tqdm's. Without tqdm, and on other processes, returns `iterable` unchanged.

    Args:
      iterable: what the loop iterates over.
      **options: tqdm's options, such as `desc`, `total`, `disable`.

    Example:
      >>> sum(dj.diagnostics.progress(range(4), disable=True))
      6
    """
    if importlib.util.find_spec("tqdm") is None or not is_first_process():
        return iterable
    from tqdm.auto import tqdm

    return tqdm(iterable, **options)


class JsonLines:
    """The file summaries.jsonl in a directory: an object a line, added to what is there."""

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "summaries.jsonl").open("a", buffering=1, encoding="utf-8")

    def add(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Adds a line; `seconds` is the Unix time."""
        # NaN and infinity are not valid JSON: a loss that blew up is written as a string.
        exact = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        own = {"time": seconds, "step": step}
        self._file.write(json.dumps({**own, **exact, **own}) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Event files in a directory, which tensorboardX writes and `tensorboard --logdir` shows."""

    def __init__(self, directory: Path):
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
        self.close = self._writer.close

    def add(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Adds a scalar for each value."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=seconds)


#: Made in this order: without its package, TensorBoard fails before a file is there.
FORMATS = {"tensorboard": TensorBoard, "jsonl": JsonLines}


class SummaryWriter:
    """Writes scalars of a run to files in a directory, on the first process only.

    Args:
      directory: the run's directory; created if missing.
      formats: "jsonl" (the file summaries.jsonl, a JSON object per line, with time, step
        and the values) and "tensorboard" (event files, by tensorboardX).

    Raises:
      ValueError: an unknown format.
      ImportError: "tensorboard" without tensorboardX.

    Example:
      >>> import pathlib, tempfile
      >>> folder = tempfile.mkdtemp()
      >>> with dj.diagnostics.SummaryWriter(folder) as writer:
      ...     writer.write(1, {"loss": 0.5})
      >>> print(pathlib.Path(folder, "summaries.jsonl").read_text(), end="")
      {"time": ..., "step": 1, "loss": 0.5}
    """

    def __init__(self, directory: str | Path, formats: Sequence[str] = ("jsonl",)):
        unknown = [name for name in formats if name not in FORMATS]
        if unknown or isinstance(formats, str):
            raise ValueError(
                message(
                    f"SummaryWriter: formats needs names among {', '.join(FORMATS)}",
                    got=describe_value(formats),
                    why="these are the formats that it can write",
                    fix="dj.diagnostics.SummaryWriter(directory, formats=('jsonl', 'tensorboard'))",
                )
            )
        self._lock = threading.Lock()
        made = [name for name in FORMATS if name in formats] if is_first_process() else []
        self._sinks = [FORMATS[name](Path(directory)) for name in made]
        self._is_closed = False
        self._failure: Exception | None = None  # of a write while a program ran

    def write(self, step: int | jax.Array | Variable, values: Mapping[str, Any]) -> None:
        """Writes a scalar for each name.

        Args:
          step: the number of the step, an array [] or a variable [].
          values: name -> number, array [] or variable [].

        Locality: M in cross-replica context; T or M in a replica function, where the value
          of replica 0 is written. Context: any. In a trace the values are written when the
          program runs; the order of the steps is not fixed. An error of writing them then, such
          as a full disk, is raised by the next `write` or `close`; once the writer is closed,
          they are dropped with a RuntimeWarning.

        Raises:
          TypeError: a step or a value that is not a real scalar, such as a PerReplica.
          ValueError: a closed writer.
        """
        self._raise_failure()
        if self._is_closed:
            raise ValueError(_closed_text("write"))
        number = _scalar("its step", step)
        values = {name: _scalar(repr(name), value) for name, value in dict(values).items()}
        frame = frames.current()
        context = frame.replica_context
        replica = 0 if context is None else context.replica_id_in_sync_group
        if frame.state is None and not jax_compat.tracing():
            self._write_now(replica, number, values)
        else:
            jax.debug.callback(self._write_from_program, replica, number, values)

    def close(self) -> None:
        """Waits for running programs to write, then closes the files."""
        try:
            jax.effects_barrier()  # raises if a callback has failed, of whatever program
        finally:
            self._is_closed = True
            for sink in self._sinks:
                sink.close()
        self._raise_failure()

    def __enter__(self) -> SummaryWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write_from_program(
        self, replica: int | jax.Array, step: int | jax.Array, values: Mapping[str, Any]
    ) -> None:
        """Writes while a program runs, which an error would end."""
        try:
            if self._is_closed and int(replica) == 0:
                warnings.warn(_closed_text("a program"), RuntimeWarning, stacklevel=2)
            elif not self._is_closed:
                self._write_now(replica, step, values)
        except Exception as error:
            self._failure = error

    def _write_now(
        self, replica: int | jax.Array, step: int | jax.Array, values: Mapping[str, Any]
    ) -> None:
        if int(replica) != 0:
            return
        numbers = {name: float(value) for name, value in values.items()}
        with self._lock:
            for sink in self._sinks:
                sink.add(int(step), numbers, time.time())


def _scalar(name: str, value: PyTree) -> Any:
    """Returns one real number; of a variable, of distjax or of Flax, its value."""
    convert = getattr(value, "__jax_array__", None)  # None of a traced value
    value = value if convert is None else convert()
    require(
        _is_real(value),
        f"write needs one number for {name}",
        got=describe_value(value),
        why="a summary has one number per name and step",
        fix="writer.write(step, {'loss': jnp.mean(x)}); of a PerReplica: strategy.reduce('mean', "
        "x)",
        error=TypeError,
    )
    return value


def _is_real(value: object) -> bool:
    """Returns whether `value` is one real number, traced or not."""
    if not isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return isinstance(value, (int, float))
    kinds = (jnp.bool_, jnp.integer, jnp.floating)
    return value.shape == () and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def _closed_text(what: str) -> str:
    return message(
        f"{what} needs an open SummaryWriter to write to",
        got="one that was closed",
        why="its files are complete",
        fix="call it before writer.close(), or in the `with` block of the writer",
    )
