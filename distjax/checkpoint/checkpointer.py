"""Checkpointer: saves a tree that may hold variables, and restores it anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from distjax.checkpoint import description as descriptions
from distjax.checkpoint.collecting import collect
from distjax.checkpoint.comparing import renamed, require_fit
from distjax.checkpoint.entries import Entry, Spec, as_saved
from distjax.checkpoint.storage import Storage
from distjax.context import frames
from distjax.errors import CheckpointError, ContextError, describe_value, explain


class Checkpointer:
    """Checkpoints of a training run in one directory.

    One logical value per variable is saved, whatever its strategy stores. So a
    checkpoint can be restored with another number of replicas, under another
    strategy, and into plain arrays.

    Args:
      directory: where the checkpoints are; made by the first `save`.
      max_to_keep: how many of the latest checkpoints stay; None: all.
      best_metric: the metric of `save` whose best checkpoint stays as well.
      best_mode: "max" or "min": which value of it is best.

    Raises:
      CheckpointError: the directory is a file.
      ValueError: max_to_keep < 1, or an unknown mode.

    Example:
      >>> import tempfile
      >>> with dj.MirroredStrategy(jax.devices()[:2]).scope():
      ...     w = dj.Variable(1.0, name="w")
      >>> with dj.VirtualStrategy(3).scope():
      ...     again = dj.Variable(0.0, name="again")
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with dj.checkpoint.Checkpointer(directory) as checkpointer:
      ...         checkpointer.save(10, {"w": w})
      ...         _ = checkpointer.restore({"w": again})
      >>> float(again.value)
      1.0

    Source: tf.train.Checkpoint and CheckpointManager; orbax CheckpointManager.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        max_to_keep: int | None = None,
        best_metric: str | None = None,
        best_mode: str = "max",
    ):
        self._directory = Path(directory).absolute()
        _require_options(self._directory, max_to_keep, best_mode)
        self._best_metric = best_metric
        self._storage = Storage(self._directory, max_to_keep, best_metric, best_mode)

    # -- writing --------------------------------------------------------------

    def save(self, step: int, tree: Any, *, metrics: Mapping[str, float] | None = None) -> None:
        """Saves the values that `tree` has now, as checkpoint `step`.

        Returns when the values are copied; they are written in the background.
        Training may go on at once.

        Args:
          step: its number, larger than those of all before.
          tree: a tree of variables, arrays, numbers, strings, Flax NNX objects, and
            objects that hold variables (optimizers, metrics, iterators of
            distributed datasets, classes of one's own).
          metrics: name -> number, for `best_metric`.

        Context: cross-replica or default, outside of `dj.jit`.

        Raises:
          CheckpointError: a value that cannot be saved, a step that is not new, a
            directory that cannot be written, or the failure of the save before.
          ContextError: inside a trace.
        """
        _require_outside("save")
        collected = collect(tree)
        entries = collected.entries
        self._require_step(step)
        self._require_metrics(metrics)
        values = {e.key: e.read() for e in entries}
        described = descriptions.describe(step, collected, values)
        arrays = {e.key: as_saved(values[e.key]) for e in entries if _is_stored(e.spec)}
        numbers = None if metrics is None else {k: float(v) for k, v in metrics.items()}
        self._storage.write(step, arrays, described, numbers)

    def wait(self) -> None:
        """Returns when all that was saved is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        self._storage.wait()

    def close(self) -> None:
        """Waits, and ends the background threads."""
        self._storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- reading --------------------------------------------------------------

    def restore(
        self,
        tree: Any,
        step: int | None = None,
        *,
        partial: bool = False,
        rename: Mapping[str, str] | None = None,
    ) -> Any:
        """Returns `tree` with the values of a checkpoint.

        Variables, Flax NNX objects and iterators are restored in place; arrays come
        back as new ones, laid out as those in `tree` are.

        Args:
          tree: like the tree that was saved; arrays may be `jax.ShapeDtypeStruct`s.
          step: the checkpoint; None: the latest one.
          partial: leave what only the checkpoint or only `tree` has as it is.
          rename: name or prefix in the checkpoint -> name in `tree`.

        Locality: as `tree`; a sync-on-read SUM is divided over the replicas, as
          `assign` does it. Context: cross-replica or default, outside of `dj.jit`.

        Raises:
          CheckpointError: no such checkpoint, or one that does not fit: all missing,
            extra and different names, before anything is changed.
          ContextError: inside a trace.
        """
        _require_outside("restore")
        self.wait()
        step = self._existing_step(step)
        described = self._description(step)
        where = f"checkpoint {step} of {self._directory.name}"
        specs = descriptions.specs_in(described)
        origins = renamed(specs, rename or {}, where)
        collected = collect(tree)
        specs = {new: specs[old] for new, old in origins.items()}
        fitting = require_fit(where, specs, collected.entries, partial=partial)
        values = self._values(step, described, fitting, origins)
        restored = {e.key: e.write(values[e.key]) for e in fitting}
        return collected.rebuild(restored)

    def latest_step(self) -> int | None:
        """Returns the number of the latest complete checkpoint; None if there is none."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the step whose `best_metric` is best; None if there is none."""
        return self._storage.best_step()

    def all_steps(self) -> list[int]:
        """Returns the numbers of all complete checkpoints, in order."""
        return self._storage.steps()

    def description(self, step: int | None = None) -> dict[str, Any]:
        """Returns what a checkpoint says of itself: versions, strategy, names, shapes.

        Raises:
          CheckpointError: there is no such checkpoint.
        """
        return self._description(self._existing_step(step))

    # -- inside ---------------------------------------------------------------

    def _values(
        self,
        step: int,
        described: Mapping[str, Any],
        entries: Sequence[Entry],
        origins: Mapping[str, str],
    ) -> dict[str, Any]:
        """Returns what the checkpoint holds for `entries`, by the names of today."""
        specs = {e.key: descriptions.specs_in(described)[origins[e.key]] for e in entries}
        stored = [e for e in entries if _is_stored(specs[e.key])]
        arrays = self._storage.arrays(step, {origins[e.key]: e.sharding for e in stored})
        values = {}
        for e in entries:
            old, spec = origins[e.key], specs[e.key]
            if spec is None:
                values[e.key] = descriptions.object_in(described, old)
            elif old in arrays:
                impl = described["entries"][old].get("key_impl")
                values[e.key] = _as_key(arrays[old], impl, e.sharding) if impl else arrays[old]
            else:
                values[e.key] = np.zeros(spec.shape, spec.dtype)
        return values

    def _description(self, step: int) -> dict[str, Any]:
        found = self._storage.description(step)
        if isinstance(found, dict) and found.get("format") == descriptions.FORMAT:
            return found
        raise CheckpointError(
            explain(
                f"checkpoint {step} of {self._directory.name} needs to be one that a Checkpointer "
                "of this version wrote",
                got="no description" if found is None else f"format {found.get('format')!r}",
                why="the names, shapes and kinds of its values stand in its description",
                fix="read it with the program that wrote it",
            )
        )

    def _existing_step(self, step: int | None) -> int:
        steps = self.all_steps()
        if step in steps:
            return step
        if step is None and steps:
            return steps[-1]
        wanted = "a checkpoint" if step is None else f"checkpoint {step}"
        raise CheckpointError(
            explain(
                f"{self._directory} needs to hold {wanted}",
                got=f"the steps {steps}" if steps else "no complete checkpoint",
                why="restore reads what save has written",
                fix="checkpointer.latest_step() is the latest one, None if there is none",
            )
        )

    def _require_step(self, step: Any) -> None:
        if not isinstance(step, (int, np.integer)) or isinstance(step, bool) or step < 0:
            raise CheckpointError(
                explain(
                    "save needs the step as an int, 0 or more",
                    got=describe_value(step),
                    why="it names the checkpoint",
                    fix="checkpointer.save(int(step), tree)",
                )
            )
        latest = self.latest_step()
        if latest is not None and step <= latest:
            raise CheckpointError(
                explain(
                    f"save needs a step after {latest}, the latest one of {self._directory.name}",
                    got=f"step {step}",
                    why="checkpoints are never overwritten",
                    fix="go on counting from checkpointer.latest_step(), or take another directory",
                )
            )

    def _require_metrics(self, metrics: Mapping[str, float] | None) -> None:
        best = self._best_metric
        if best is None or (metrics is not None and best in metrics):
            return
        raise CheckpointError(
            explain(
                f"save needs the metric {best!r}, by which the best checkpoint is kept",
                got="no metrics" if metrics is None else f"the metrics {sorted(metrics)}",
                why="the Checkpointer was made with best_metric",
                fix=f"checkpointer.save(step, tree, metrics={{{best!r}: value}})",
            )
        )


def _is_stored(spec: Spec | None) -> bool:
    """Returns whether a value is among the arrays: orbax takes none without elements."""
    return spec is not None and 0 not in spec.shape


def _as_key(data: Any, impl: str, sharding: Any) -> jax.Array:
    keys = jax.random.wrap_key_data(jax.numpy.asarray(data), impl=impl)
    return keys if sharding is None else jax.device_put(keys, sharding)


def _require_outside(method: str) -> None:
    frame = frames.current()
    if frame.state is None and (frame.is_default or frame.replica_context is None):
        return
    raise ContextError(
        explain(
            f"{method} needs to be called outside of replica functions and dj.jit",
            got="a call while a program is traced",
            why="a checkpoint holds values, and a trace has none yet",
            fix=f"checkpointer.{method}(...) in the loop, after strategy.run has returned",
        )
    )


def _require_options(directory: Path, max_to_keep: Any, best_mode: Any) -> None:
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(
            explain(
                "Checkpointer needs a directory",
                got=f"{directory}, which is a file",
                why="each checkpoint is a folder in it",
                fix="dj.checkpoint.Checkpointer('checkpoints')",
            )
        )
    if max_to_keep is not None and (not isinstance(max_to_keep, int) or max_to_keep < 1):
        raise ValueError(
            explain(
                "Checkpointer: max_to_keep needs a positive int, or None for all",
                got=describe_value(max_to_keep),
                why="it counts the checkpoints that stay",
                fix="dj.checkpoint.Checkpointer(directory, max_to_keep=3)",
            )
        )
    if best_mode not in ("max", "min"):
        raise ValueError(
            explain(
                "Checkpointer: best_mode needs 'max' or 'min'",
                got=describe_value(best_mode),
                why="it says which value of best_metric is best",
                fix="dj.checkpoint.Checkpointer(directory, best_metric='loss', best_mode='min')",
            )
        )
