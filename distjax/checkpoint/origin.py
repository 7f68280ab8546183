"""Checks that a Checkpointer is used in the process and the job that it was made in."""

from __future__ import annotations

import os

from distjax.cluster.job import Job, job
from distjax.errors import CheckpointError, ContextError, message


def require_own_process(process: int | None) -> None:
    """Raises a ContextError in a process forked from the one that reads and writes files.

    Args:
      process: the number of the process whose threads do; None: no threads yet.
    """
    if process in (None, os.getpid()):
        return
    raise ContextError(
        message(
            "a Checkpointer needs to be used in the process that began to use it",
            got=f"process {os.getpid()}, forked from process {process}",
            why="the threads that read and write files are not in it, so it would wait forever",
            fix="a new one in the new process: dj.checkpoint.Checkpointer(directory)",
        )
    )


def require_own_job(joined: Job | None) -> None:
    """Raises a CheckpointError if the process joined its job after the Checkpointer was made.

    Args:
      joined: the job at that time.
    """
    now = job()
    if now is joined or now is None:
        return
    raise CheckpointError(
        message(
            "Checkpointer needs to be constructed after the process has joined its job",
            got=f"one made before dj.initialize, in what is now {now.name_process(now.process_id)}",
            why="each process would save by itself, all into one directory",
            fix="dj.initialize() at the start of the program; for what one process alone keeps: "
            "dj.checkpoint.Checkpointer(directory, local=True)",
        )
    )
