"""Positions in the data, which may differ per process of a job."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from distjax.cluster.job import Job
from distjax.cluster.meeting import exchange
from distjax.errors import CheckpointError, message
from distjax.typing import PyTree

#: Marks states stored by process in a checkpoint's JSON; no tag of `json_values` has this name.
_BY_PROCESS = "processes"


def gather_states(joined: Job | None, states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns states in checkpoint form: one per process where the processes differ."""
    if joined is None or not states:
        return dict(states)
    texts = exchange(joined, "the save of the position in the data", json.dumps(states))
    everyone = [json.loads(text) for text in texts]
    by_key = {key: [said[key] for said in everyone] for key in states}
    return {
        key: own[0] if all(state == own[0] for state in own) else {_BY_PROCESS: own}
        for key, own in by_key.items()
    }


def own_state(joined: Job | None, key: str, saved: PyTree, where: str) -> Any:
    """Returns this process's part of a saved state.

    Raises:
      CheckpointError: it was saved per process, by a different number of processes.
    """
    if not (isinstance(saved, dict) and _BY_PROCESS in saved):
        return saved
    states, count = saved[_BY_PROCESS], 1 if joined is None else joined.num_processes
    if len(states) == count:
        return states[0 if joined is None else joined.process_id]
    raise CheckpointError(
        message(
            f"{key!r} of {where} needs the number of processes that saved it, {len(states)}",
            got=f"{count}",
            why="each of them read data of its own, and other processes would read some examples "
            "twice and others never. Nothing has been changed",
            fix="start as many processes; leave it out: restore(tree without it, partial=True); or "
            "let all read the same global batches, whose position holds for any number",
        )
    )
