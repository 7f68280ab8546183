"""Storage: a directory of checkpoints, and the one door to orbax."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from distjax.errors import CheckpointError, explain

_ARRAYS, _DESCRIPTION = "arrays", "description"


class Storage:
    """Checkpoints in a directory: each a dict of arrays and a description in JSON.

    Args:
      directory: made by the first `write`.
      max_to_keep: how many of the latest stay; None: all.
      best_metric: the metric whose best checkpoint stays as well; None: no such.
      best_mode: "max" or "min".
    """

    def __init__(
        self, directory: Path, max_to_keep: int | None, best_metric: str | None, best_mode: str
    ):
        self.directory = directory
        self._best_metric = best_metric
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=_preservation(max_to_keep, best_metric, best_mode),
            best_fn=None if best_metric is None else lambda metrics: metrics[best_metric],
            best_mode=best_mode,
        )
        self._manager: ocp.CheckpointManager | None = None
        self._has_cleaned_up = False

    def write(
        self,
        step: int,
        arrays: Mapping[str, Any],
        description: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        """Copies the arrays, then writes them in the background.

        Raises:
          CheckpointError: it failed, or the write before did.
        """
        items: dict[str, Any] = {_DESCRIPTION: ocp.args.JsonSave(dict(description))}
        if arrays:
            items[_ARRAYS] = ocp.args.PyTreeSave(dict(arrays))
        with self._reported(f"checkpoint {step}"):
            self._writer().save(step, args=ocp.args.Composite(**items), metrics=metrics)

    def wait(self) -> None:
        """Returns when all is on disk."""
        if self._manager is not None:
            with self._reported("the latest checkpoint"):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the background threads."""
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            if manager is not None:
                manager.close()

    def steps(self) -> list[int]:
        """Returns the numbers of the complete checkpoints, in order."""
        self.wait()
        reader = self._reader()
        if reader is None:
            return []
        reader.reload()  # another process may write to the directory
        return sorted(reader.all_steps())

    def best_step(self) -> int | None:
        """Returns the step whose metric is best; None if there is none."""
        reader = self._reader()
        return None if reader is None or self._best_metric is None else reader.best_step()

    def description(self, step: int) -> Any:
        """Returns the description of an existing checkpoint; None if it has none."""
        items = ocp.args.Composite(**{_DESCRIPTION: ocp.args.JsonRestore()})
        return self._restored(step, items)[_DESCRIPTION]

    def arrays(self, step: int, shardings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns arrays of an existing checkpoint.

        Args:
          step: the checkpoint.
          shardings: name -> where the array is put; None: on the host, as numpy.
        """
        if not shardings:
            return {}
        arguments = {
            key: ocp.RestoreArgs(restore_type=np.ndarray)
            if sharding is None
            else ocp.ArrayRestoreArgs(sharding=sharding)
            for key, sharding in shardings.items()
        }
        wanted = dict.fromkeys(shardings, 0)
        restore = ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True)
        return self._restored(step, ocp.args.Composite(**{_ARRAYS: restore}))[_ARRAYS]

    def _restored(self, step: int, items: Any) -> Any:
        reader = self._reader()
        assert reader is not None, "the checkpoint was found in this directory"
        with self._reported(f"checkpoint {step}"):
            return reader.restore(step, args=items)

    def _reader(self) -> ocp.CheckpointManager | None:
        """Returns the manager; None while there is no directory."""
        if self._manager is None and self.directory.is_dir():
            self._manager = ocp.CheckpointManager(self.directory, options=self._options)
        return self._manager

    def _writer(self) -> ocp.CheckpointManager:
        """Returns the manager, with what killed writers left behind removed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not self._has_cleaned_up:
            for left in self.directory.glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"):
                shutil.rmtree(left, ignore_errors=True)
            self._has_cleaned_up = True
        manager = self._reader()
        assert manager is not None, "the directory has just been made"
        return manager

    @contextlib.contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """Raises what orbax and the file system raise as a CheckpointError."""
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            first = str(error).strip().splitlines()
            raise CheckpointError(
                explain(
                    f"{what} of {self.directory} needs to be written or read",
                    got=f"{type(error).__name__}: {first[0] if first else ''}",
                    why="the file system or the checkpoint library refused it; earlier "
                    "checkpoints are untouched",
                    fix="look at the space on the disk, and at permissions; then save again",
                )
            ) from error


def _preservation(max_to_keep: int | None, best_metric: str | None, best_mode: str) -> Any:
    if max_to_keep is None:
        return None
    latest = preservation_policy.LatestN(max_to_keep)
    if best_metric is None:
        return latest
    best = preservation_policy.BestN(
        get_metric_fn=lambda metrics: metrics[best_metric],
        reverse=best_mode == "min",
        n=1,
        keep_checkpoints_without_metrics=False,
    )
    return preservation_policy.AnyPreservationPolicy([latest, best])
