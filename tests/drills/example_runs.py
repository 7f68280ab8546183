"""Runs the examples in a process of a group, over all devices of its job."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import pathlib
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import distjax as dj
from tests.processes.warm import ROOT

#: Over all devices of a job, or of one process.
STRATEGIES: dict[str, Callable[[], dj.Strategy]] = {
    "mirrored": dj.MultiWorkerMirroredStrategy,
    "zero1": functools.partial(dj.ShardedStrategy, partition="optimizer", min_split_bytes=0),
    "zero3": functools.partial(dj.ShardedStrategy, partition="parameters", min_split_bytes=0),
    "central": dj.CentralStorageStrategy,
}
LANGUAGE_MODEL = "language_model/train.py"
#: Scripts and strategies.
FORMS = (
    *((f"digits/{name}.py", "mirrored") for name in ("train", "modules", "functional")),
    *((LANGUAGE_MODEL, strategy) for strategy in STRATEGIES),
)
_SMALL = ("--log-every", "1", "--width", "32", "--context", "32", "--layers", "2", "--sample", "1")


class Curve(NamedTuple):
    """The loss of each step, and the accuracy on the test set (digits)."""

    losses: list[float]
    accuracy: float | None


def run_example(script: str, strategy: str, *options: str) -> Curve | None:
    """Runs an example over all devices; what came out is told by process 0."""
    path, said = ROOT / "examples" / script, {}
    with tempfile.TemporaryDirectory() as folder, _in_place_of(path, strategy, said):
        losses = pathlib.Path(folder, "losses.json")
        small = _SMALL if script == LANGUAGE_MODEL else ("--out", folder)
        sys.argv = [str(path), "--dump-losses", str(losses), *small, *options]
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(str(path), run_name="__main__")
        if not losses.exists():
            return None
        return Curve(json.loads(losses.read_text()), said.get("accuracy"))


@contextlib.contextmanager
def _in_place_of(path: pathlib.Path, strategy: str, said: dict[str, Any]) -> Iterator[None]:
    """Gives a script our strategy, and has it tell its accuracy."""
    arguments = sys.argv
    with modules_of(path):
        options = importlib.import_module("options")
        options.make_strategy = lambda *_: STRATEGIES[strategy]()
        if path.parent.name == "digits":
            report = importlib.import_module("report")
            write = report.write

            def tell(chosen, strategy, history):
                said["accuracy"] = history.accuracies[-1][1]
                write(chosen, strategy, history)

            report.write = tell
        try:
            yield
        finally:
            sys.argv = arguments


@contextlib.contextmanager
def modules_of(path: pathlib.Path) -> Iterator[None]:
    """Lets the modules beside an example be imported meanwhile."""
    before = set(sys.modules)
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        sys.path.remove(str(path.parent))
        for name in {name for name in sys.modules if "." not in name} - before:
            if str(path.parent) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]  # another example has modules of these names


def compute_in_64_bits() -> None:
    """Makes 64 bits the width of JAX's numbers, and of Flax's parameters.

    Flax binds its default, `jnp.float32`, where its classes are defined.
    """
    import jax
    import jax.numpy as jnp

    assert "flax" not in sys.modules, "too late"
    jax.config.update("jax_enable_x64", True)
    jnp.float32 = jnp.float64
