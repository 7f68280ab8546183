"""Lookups that one process makes for all processes of a job.

A file system may answer processes differently about a directory just created, or a step
just removed. Processes with different answers would not reach the same barriers, so process 0
looks and tells the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from distjax.cluster.job import Job
from distjax.cluster.meeting import exchange
from distjax.cluster.phases import phase
from distjax.errors import CheckpointError, describe_error, message


def ask_first_process(joined: Job | None, occasion: str, look: Callable[[], Any]) -> Any:
    """Returns process 0's ``look()``, a JSON value, on every process.

    Args:
      joined: the job whose processes ask; None: this process alone, which looks itself.
      occasion: what all of them are about to do, for errors.
      look: called on process 0 only.

    Raises:
      CheckpointError: on every other process, if ``look`` raises on process 0, which raises its
        own error.
      ClusterError: a process does not arrive, or does something else.
    """
    if joined is None:
        return look()
    answer: dict[str, Any] = {}
    raised: Exception | None = None
    if joined.process_id == 0:
        try:
            with phase(occasion):  # it looks at files: the others wait for as long as that takes
                answer = {"value": look()}
        except Exception as error:
            answer, raised = {"error": _as_text(occasion, error)}, error
    seconds = joined.timeouts.step_deadline
    told = json.loads(exchange(joined, occasion, json.dumps(answer), seconds)[0])
    if raised is not None:
        raise raised
    if "error" in told:
        raise CheckpointError(told["error"])
    return told["value"]


def _as_text(occasion: str, error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return message(
        f"{occasion} needs process 0 to see the directory",
        got=describe_error(error),
        why="it looks for all processes, so that all of them do the same",
        fix="what process 0 says, in its own error",
    )
