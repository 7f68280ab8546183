"""Checks a checkpoint directory: what it holds, who can write it, who sees it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from distjax.checkpoint.together import hear_all, hear_first
from distjax.cluster.job import Job
from distjax.errors import CheckpointError, describe_value, message

#: The suffix of directories that orbax has not completed.
UNFINISHED = ".orbax-checkpoint-tmp"

#: How long a process looks for another's file: network file systems take a moment.
_LOOK_SECONDS = 5.0
#: More than orbax writes before the processes have begun to write their parts.
_ATTEMPT_BYTES = 1 << 14


def require_checkpoint_directory(directory: object) -> None:
    """Raises unless `directory` is a path to checkpoints, or to nothing yet.

    Raises:
      CheckpointError: it is a file, or a directory of something else.
      TypeError: it is not a path.
    """
    if not isinstance(directory, (str, os.PathLike)):
        raise TypeError(
            message(
                "Checkpointer needs the path of a directory",
                got=describe_value(directory),
                why="a folder is made in it for each step",
                fix="dj.checkpoint.Checkpointer('runs/first')",
            )
        )
    text = os.fspath(directory)
    path = Path(text)
    fix = "dj.checkpoint.Checkpointer('runs/first')"
    if "://" in text:
        got, fix = "a URL", "mount the bucket, and pass the path where it is mounted"
    elif path.is_dir():
        names = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
        if not names or any(name.isdigit() or name.endswith(UNFINISHED) for name in names):
            return
        got = f"a directory of something else ({_some(names)})"
        fix = f"dj.checkpoint.Checkpointer({str(path / 'checkpoints')!r})"
    elif path.exists():
        got = "a file"
    else:
        return
    raise CheckpointError(
        message(
            f"Checkpointer needs a directory for checkpoints, or a new or empty one: {text!r}",
            got=got,
            why="a folder is made in it for each step, and old ones are removed",
            fix=fix,
        )
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def try_to_write(directory: str, process_id: int) -> None:
    """Makes the directory, and in it a file, which it removes.

    Args:
      directory: its path.
      process_id: names the file, so that the next attempt removes what a killed process left.

    Raises:
      OSError: it is closed to this process, read-only, or full.
    """
    os.makedirs(directory, exist_ok=True)
    path = Path(directory, f".distjax-{process_id}")
    try:
        path.write_bytes(bytes(_ATTEMPT_BYTES))
    finally:
        path.unlink(missing_ok=True)


def remove_unfinished(directory: str) -> None:
    """Removes what a killed process left of its saves, as orbax's first save would.

    Raises:
      OSError: it belongs to another user, say.
    """
    for name in os.listdir(directory):
        if name.endswith(UNFINISHED):
            shutil.rmtree(os.path.join(directory, name))


def require_shared_directory(joined: Job, directory: str) -> None:
    """Creates the directory, and raises on every process unless all see the same one.

    Process 0 leaves a file there until the others have seen it; if it cannot write, they
    compare the names of the steps.

    Raises:
      CheckpointError: a process sees another directory; nothing is left in it.
    """
    occasion = "the construction of a Checkpointer"  # the path may be spelled differently elsewhere
    token = hear_first(joined, occasion, lambda: _leave_token(directory))
    try:
        sees = lambda: _names(directory) if token is None else _sees(directory, token)
        said = hear_all(joined, occasion, lambda: [sees(), directory])
    finally:
        if token is not None and joined.process_id == 0:
            with contextlib.suppress(OSError):
                os.remove(os.path.join(directory, token))
    everyone, paths = zip(*said, strict=True)
    differ = [i for i, seen in enumerate(everyone) if seen != everyone[0]]
    if differ:
        raise CheckpointError(_not_shared_text(joined, paths, differ))


def _leave_token(directory: str) -> str | None:
    token = f".distjax-{secrets.token_hex(8)}"
    try:
        os.makedirs(directory, exist_ok=True)
        Path(directory, token).touch()
    except OSError:
        return None
    return token


def _sees(directory: str, token: str) -> bool:
    deadline = time.monotonic() + _LOOK_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if token in os.listdir(directory):
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def _names(directory: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(name for name in os.listdir(directory) if name.isdigit())
    return []


def _not_shared_text(joined: Job, paths: Sequence[str], differ: Sequence[int]) -> str:
    own, other = paths[0], paths[differ[0]]
    names = ", ".join(map(joined.name_process, differ))
    found = f"looked in {other!r}" if other != own else "found something else"
    return message(
        "Checkpointer needs a directory that all processes of the job share",
        got=f"{own!r} on process 0, where {names} {found}",
        why="each process writes its part of a step, and process 0 completes it",
        fix="a path on a shared file system, the same on every process; for what one process "
        "alone keeps: dj.checkpoint.Checkpointer(directory, local=True)",
    )
