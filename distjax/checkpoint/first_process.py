"""Lookups that one process makes for all processes of a job.

A file system may answer processes differently about a directory just created, or a step
just removed. Processes with different answers would not reach the same barriers, so process 0
looks and tells the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from distjax.cluster.job import job
from distjax.cluster.meeting import exchange
from distjax.errors import CheckpointError


def hear_from_first(occasion: str, look: Callable[[], Any]) -> Any:
    """Returns process 0's ``look()``, a JSON value, on every process.

    Args:
      occasion: what all of them are about to do, for errors.
      look: called on process 0 only, or here if there is no job.

    Raises:
      CheckpointError: on every process, if ``look`` raises it on process 0.
      ClusterError: a process does not arrive, or does something else.
    """
    joined = job()
    if joined is None:
        return look()
    said = ""
    if joined.process_id == 0:
        try:
            said = json.dumps({"value": look()})
        except CheckpointError as error:
            said = json.dumps({"error": str(error)})
    heard = json.loads(exchange(joined, occasion, said, joined.timeouts.phase)[0])
    if "error" in heard:
        raise CheckpointError(heard["error"])
    return heard["value"]
