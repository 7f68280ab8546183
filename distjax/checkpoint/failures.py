"""Errors for steps that cannot be written, read or removed."""

from __future__ import annotations

from distjax.errors import CheckpointError, describe_error, message


def not_written(where: str, error: Exception) -> CheckpointError:
    """Returns the error for a step that cannot be written.

    Args:
      where: the step and its directory.
      error: that of orbax, of the disk, or of another process.
    """
    return CheckpointError(
        message(
            f"{where} needs to be written to the disk",
            got=describe_error(error),
            why="the disk may be full, the directory closed to this user, or another "
            "checkpointer writing to it; the step is not complete, those before it are as "
            "they were",
            fix="make room, or give another directory, and call checkpointer.save(step, "
            "tree) again",
        )
    )


def not_read(where: str, error: Exception) -> CheckpointError:
    """Returns the error for a step that cannot be read; arguments as for `not_written`."""
    return CheckpointError(
        message(
            f"{where} needs to be one that distjax wrote, with all its files",
            got=describe_error(error),
            why="it was written by another program, or files in it are damaged or gone, as "
            "those of a step that max_to_keep has removed. Nothing has been changed",
            fix="restore another step: checkpointer.restore(tree, step=...); "
            "checkpointer.all_steps() lists them",
        )
    )


def not_removed(where: str, error: Exception) -> CheckpointError:
    """Returns the error for a step that cannot be removed; arguments as for `not_written`."""
    return CheckpointError(
        message(
            f"{where} needs to be removed from the disk",
            got=describe_error(error),
            why="the directory may be closed to this user, or the disk read-only",
            fix="open it for writing, and call checkpointer.delete(step) again",
        )
    )
