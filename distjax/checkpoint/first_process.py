"""What one process looks up, and all processes of a job hear.

A file system may answer one process otherwise than another: of a folder that was just made, or a
step that was just removed. What follows is a barrier for all of them, so process 0 looks and the
others hear.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from distjax.cluster.job import job
from distjax.cluster.meeting import exchange
from distjax.errors import CheckpointError


def hear_from_first(occasion: str, look: Callable[[], Any]) -> Any:
    """Returns what ``look()`` returns on process 0, on every process; JSON.

    Args:
      occasion: what all of them are about to do, for errors.
      look: called on process 0 only, or where there is no job.

    Raises:
      CheckpointError: as ``look`` raises it on process 0, on every process.
      ClusterError: a process does not come, or does something else.
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
