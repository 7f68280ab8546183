"""Checkpointer and DelayedRestore: the public interface to checkpoints."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from distjax._src.checkpoint.leaves import ArrayLeaf, pause_writers
from distjax._src.checkpoint.saved import Saved, describe, padded_shapes
from distjax._src.checkpoint.storage import Storage
from distjax._src.checkpoint.trees import as_tree
from distjax._src.context import frames
from distjax._src.typing import PyTree
from distjax._src.variables.conversion import dtype_rank
from distjax.errors import CheckpointError, describe_value, is_int, message, require, require_int


class Checkpointer:
    """Saves and restores training state, on any strategy and number of replicas.

    A tree may hold variables, arrays, PRNG keys, PerReplica values, Python
    numbers, Flax NNX objects and linen train states, Equinox modules (their arrays),
    `dj.optim` optimizers, `dj.metrics`, and data iterators (their position). A variable is saved as
    its one value in cross-replica context (components: their sum, mean or first,
    by its aggregation) under its path in the tree, so it can be restored to a
    variable of any strategy, or to an array.

    Args:
      directory: the directory of the steps; created by the first save.
      max_to_keep: how many of the latest steps to keep; None: all.
      best_metric: keep the best steps by this metric instead, plus the latest.
      best_mode: "max" or "min": which is better.
      local: in a job of several processes, whether this process checkpoints on its
        own, for values it holds in full. Otherwise all processes construct it, save and
        restore together, and share the directory.

    Raises:
      CheckpointError: `directory` is a file, holds something else, or, in a job, is
        not shared by all processes.
      TypeError: `directory` is not a path.
      ValueError: an invalid `max_to_keep` or `best_mode`.

    Example:
      >>> import tempfile
      >>> strategy = dj.VirtualStrategy(2)
      >>> with strategy.scope():
      ...     w = dj.Variable(jnp.arange(3.0), name="w")
      >>> with dj.checkpoint.Checkpointer(tempfile.mkdtemp()) as checkpointer:
      ...     checkpointer.save(1, {"w": w})
      ...     _ = w.assign(jnp.zeros(3))
      ...     _ = checkpointer.restore({"w": w})
      >>> w.value
      Array([0., 1., 2.], dtype=float32)

    Source: tf.train.Checkpoint and CheckpointManager; orbax CheckpointManager.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = None,
        best_metric: str | None = None,
        best_mode: str = "max",
        local: bool = False,
    ):
        _require_options(max_to_keep, best_mode)
        self._best_metric = best_metric
        self._storage = Storage(directory, max_to_keep, best_metric, best_mode, local)

    @property
    def directory(self) -> str:
        """The absolute path of the directory."""
        return self._storage.directory

    # -- saving ---------------------------------------------------------------

    def save(self, step: int, tree: PyTree, *, metrics: Mapping[str, Any] | None = None) -> None:
        """Saves the current values of `tree`, writing them in the background.

        Training may continue at once. Waits first for a save still in progress.
        A step is either complete or absent, whenever the process is killed.

        Args:
          step: its number, greater than any in the directory.
          tree: any pytree of the values listed by the class.
          metrics: numbers by name, stored with the step.

        Context: cross-replica or default, outside of traces.
        Cost: a reduction per sync-on-read variable, a copy of the values to the host.

        Raises:
          CheckpointError: a leaf that cannot be saved, a step that exists or is not
            after the latest, a full disk; or the previous save failed.
          AgreementError: in a job, processes save different steps, keys, shapes or
            values of `best_metric`; nothing is written.
          AggregationError: a sync-on-read variable with aggregation NONE.
          ContextError: in a replica function, or in a trace.
          ValueError: an invalid step number, or metrics without the `best_metric`.
        """
        wanted = as_tree(tree, "save")
        step = _require_step(step, "save", "checkpointer.save(int(step), tree)")
        metrics = self._require_metrics(metrics)
        leaves = wanted.leaves.values()
        decisive = {name: metrics[name] for name in metrics if name == self._best_metric}
        self._storage.agree("the save of a checkpoint", step, leaves, decisive)
        self._require_after_latest(step)
        for leaf in leaves if self._storage.job is not None else ():
            if isinstance(leaf, ArrayLeaf):
                leaf.require_of_all_processes()
        # In the default context, variables of every strategy can be read.
        with frames.with_stack(()), pause_writers(leaves):
            description = describe(step, leaves, metrics, self._storage.job)
            arrays = {
                key: leaf.snapshot()
                for key, leaf in wanted.leaves.items()
                if leaf.spec.is_stored_as_array
            }
        self._storage.write(step, arrays, description, padded_shapes(leaves))

    def wait(self) -> None:
        """Blocks until the save in progress is complete.

        Raises:
          CheckpointError: it failed; chained to the error of orbax or the disk.
        """
        self._storage.wait()

    def delete(self, step: int) -> None:
        """Removes a step.

        Raises:
          CheckpointError: the step does not exist or cannot be removed.
          ValueError: an invalid step number.
        """
        step = _require_step(step, "delete", "checkpointer.delete(checkpointer.all_steps()[0])")
        self._storage.agree("the removal of a checkpoint", step)
        self._storage.delete(self._existing(step))

    def close(self) -> None:
        """Waits, and raises, as `wait` does; a later `save` works."""
        self.wait()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- restoring ------------------------------------------------------------

    def restore(
        self,
        tree: PyTree,
        step: int | None = None,
        *,
        partial: bool = False,
        rename: Mapping[str, str] | None = None,
    ) -> Any:
        """Returns `tree` with the saved values; variables are restored in place.

        So are Flax NNX objects, optimizers, metrics and iterators. Arrays and numbers in
        the returned tree are new, and live where those of `tree` do. After an interrupt
        (Ctrl-C), either everything is restored or nothing has changed.

        Args:
          tree: a tree of the structure that was saved; variables and arrays are
            interchangeable, and `jax.ShapeDtypeStruct` may stand for an array.
          step: which step; default: the latest.
          partial: restore the keys that both have, and ignore the others.
          rename: maps keys of the checkpoint, or prefixes of keys up to a "/", to
            their names in `tree`.

        Locality: that of `tree`. A sync-on-read variable with aggregation SUM gets
          its value divided among the components, losslessly for integers.
        Context: cross-replica or default, outside of traces.

        Raises:
          CheckpointError: no such step; keys that are missing, extra or of another
            shape (all are listed), or values out of the range of a place's dtype: nothing
            is changed; damaged files; or the save in progress failed.
          AgreementError: in a job, processes restore different steps, keys or shapes.
          AggregationError, ContextError: as for `save`.
          TypeError: `rename` does not map text to text.
        """
        wanted = as_tree(tree, "restore")
        rename = _require_rename(rename)
        options = {"partial": partial, "rename": sorted(rename.items())}
        leaves = wanted.leaves.values()
        self._storage.agree("the restoration of a checkpoint", step, leaves, options)
        saved = Saved(self._storage, self._existing(step), rename)
        return saved.restore(wanted, saved.names, partial=partial)

    def delayed(
        self, step: int | None = None, *, rename: Mapping[str, str] | None = None
    ) -> DelayedRestore:
        """Returns a restore for variables that do not exist yet: see `DelayedRestore`.

        Args:
          step: which step; default: the latest.
          rename: as for `restore`.

        Raises:
          CheckpointError: no such step.
          TypeError: as for `restore`.
        """
        rename = _require_rename(rename)
        options = {"rename": sorted(rename.items())}
        self._storage.agree("the delayed restoration", step, options=options)
        return DelayedRestore(Saved(self._storage, self._existing(step), rename))

    # -- querying -------------------------------------------------------------

    def all_steps(self) -> list[int]:
        """Returns the complete steps in order, after waiting for a save in progress."""
        self.wait()
        return self._storage.steps()

    def latest_step(self) -> int | None:
        """Returns the latest complete step, or None. Waits as `all_steps` does."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the best step by `best_metric`, or None.

        Waits as `all_steps` does.
        """
        self.wait()
        return self._storage.best_step()

    def description(self, step: int | None = None) -> dict[str, Any]:
        """Returns a step's description of the run that wrote it, as JSON.

        It has the versions of distjax and JAX, the strategies and their numbers of replicas,
        the step, the metrics, and the form, shape, dtype and kind of each key.
        """
        return self._storage.description(self._existing(step))

    def __repr__(self) -> str:
        return f"Checkpointer({self.directory!r})"

    # -- checks ---------------------------------------------------------------

    def _existing(self, step: int | None) -> int:
        steps = self.all_steps()
        if steps and step is None:
            return steps[-1]
        if step in steps:
            return int(step)
        raise CheckpointError(
            f"{self.directory!r} needs a complete checkpoint"
            + ("" if step is None else f" of step {step}"),
            got=f"the steps {', '.join(map(str, steps))}" if steps else "none",
            why="a step whose save did not finish does not count",
            fix="checkpointer.save(step, tree) first; `if checkpointer.latest_step() is not "
            "None` says whether there is one",
        )

    def _require_after_latest(self, step: int) -> None:
        latest = self.latest_step()
        require(
            latest is None or step > latest,
            f"save needs a step after the latest one in {self.directory!r}, {latest}",
            got=f"step {step}",
            why="the latest step is where a run resumes, and steps are never overwritten",
            fix=f"checkpointer.delete({latest}) and those down to {step} to start again from "
            "there; or another directory",
            error=CheckpointError,
        )

    def _require_metrics(self, metrics: object) -> dict[str, float]:
        best, found = self._best_metric, metrics or {}
        if isinstance(found, Mapping) and all(map(_is_number, found.values())):
            if best is None or best in found:
                return {name: float(value) for name, value in found.items()}
        needed = "numbers by name" if best is None else f"numbers by name, {best!r} among them"
        raise ValueError(
            message(
                f"save: metrics needs {needed}",
                got=describe_value(metrics),
                why="they are kept with the step, and choose which steps are kept",
                fix=f"save(step, tree, metrics={{{best or 'loss'!r}: float(loss)}})",
            )
        )


class DelayedRestore:
    """Restores each key of a checkpoint once, when a tree containing it is passed.

    For state that is created late, such as variables made on a first call, or the slots of
    an optimizer. Returned by `Checkpointer.delayed`, which chooses the step.

    Example:
      >>> import tempfile
      >>> with dj.checkpoint.Checkpointer(tempfile.mkdtemp()) as checkpointer:
      ...     checkpointer.save(1, {"w": jnp.float32(5.0), "b": jnp.float32(7.0)})
      ...     later = checkpointer.delayed()
      ...     w = dj.Variable(0.0)  # created after the restore was requested
      ...     _ = later.restore({"w": w})
      ...     print(float(w.value), later.remaining)
      ...     _ = w.assign(1.0)
      ...     b = dj.Variable(0.0)
      ...     _ = later.restore({"w": w, "b": b})  # w has had its value
      ...     print(float(w.value), float(b.value), later.remaining)
      5.0 ('b',)
      1.0 7.0 ()

    Source: tf.train.Checkpoint.restore, deferred restoration.
    """

    def __init__(self, saved: Saved):
        self._saved = saved
        self._left = dict(saved.names)

    @property
    def remaining(self) -> tuple[str, ...]:
        """The keys not yet restored, under their names in the tree."""
        return tuple(self._left)

    def restore(self, tree: PyTree) -> Any:
        """Returns `tree` with saved values for those of its keys not yet restored.

        Other keys of `tree` are left alone.

        Locality, Context: as for `Checkpointer.restore`.

        Raises:
          CheckpointError: a value of the wrong shape; nothing is changed, and the key
            remains.
          AgreementError: in a job, processes restore different keys or shapes.
        """
        wanted = as_tree(tree, "restore")
        names = {key: self._left[key] for key in wanted.leaves if key in self._left}
        self._saved.agree("a delayed restoration", [wanted.leaves[key] for key in names])
        if not names:
            return tree
        restored = self._saved.restore(wanted, names, partial=True)
        for key in names:
            del self._left[key]
        return restored

    def require_all(self) -> None:
        """Raises a CheckpointError listing the keys that remain, if any."""
        require(
            not self._left,
            "a delayed restore needs trees that take all that was saved",
            got=f"no place yet for {', '.join(self._left)}",
            why="state that was saved but is never restored silently starts from scratch",
            fix="later.restore(tree) with these keys in it, or do without require_all()",
            error=CheckpointError,
        )


def _is_number(value: object) -> bool:
    dtype = getattr(value, "dtype", None)
    if dtype is None or getattr(value, "shape", None) != ():
        return isinstance(value, numbers.Real)
    return dtype_rank(dtype) is not None and not jnp.issubdtype(dtype, jnp.complexfloating)


def _require_rename(rename: object) -> Mapping[str, str]:
    if rename is None:
        return {}
    if isinstance(rename, Mapping) and all(
        isinstance(key, str) and key for pair in rename.items() for key in pair
    ):
        return rename
    raise TypeError(
        message(
            "rename needs to map keys of the checkpoint to names in the tree",
            got=describe_value(rename),
            why='a key is a path joined by "/", as checkpointer.description() lists them',
            fix="rename={'old/path': 'new/path'}",
        )
    )


def _require_step(step: object, method: str, fix: str) -> int:
    why = "steps are in the order of their numbers, and the latest is where a run resumes"
    return require_int(f"{method}: step", step, 0, why=why, fix=fix)


def _require_options(max_to_keep: object, best_mode: object) -> None:
    is_count = is_int(max_to_keep) and max_to_keep >= 1
    require(
        (max_to_keep is None or is_count) and best_mode in ("max", "min"),
        "Checkpointer needs max_to_keep=None or a positive int, and best_mode 'max' or 'min'",
        got=f"max_to_keep={max_to_keep!r}, best_mode={best_mode!r}",
        why="they say how many steps are kept, and which metric is better",
        fix="dj.checkpoint.Checkpointer(directory, max_to_keep=3, best_metric='loss', "
        "best_mode='min')",
    )
