"""The cluster described by TF_CONFIG, as tf.distribute reads it."""

from __future__ import annotations

import json
import os
from typing import Any

from distjax.errors import ClusterError, message


def read_tf_config() -> tuple[str, int, int] | None:
    """Returns (coordinator address, number of processes, process id), or None.

    The chief is process 0, followed by the workers; an evaluator is a separate program, as in
    tf.distribute.
    """
    text = os.environ.get("TF_CONFIG", "").strip()
    if text in ("", "{}"):
        return None
    try:
        config = json.loads(text)
        cluster, task = config.get("cluster") or {}, config.get("task") or {}
        if not cluster or task.get("type") == "evaluator":
            return None
        return _find_task(cluster, str(task["type"]), int(task["index"]))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ClusterError(
            message(
                "TF_CONFIG needs to name a cluster of workers and which of them this process is",
                got=text if len(text) <= 300 else text[:297] + "...",
                why=f"it cannot be read so ({type(error).__name__}: {error})",
                fix='{"cluster": {"worker": ["host-a:1234", "host-b:1234"]}, '
                '"task": {"type": "worker", "index": 0}}, or unset TF_CONFIG',
            )
        ) from None


def _find_task(cluster: dict[str, Any], kind: str, index: int) -> tuple[str, int, int]:
    chiefs = cluster.get("chief") or cluster.get("master") or []
    addresses = [*chiefs, *cluster.get("worker", [])]
    offset = {"chief": 0, "master": 0, "worker": len(chiefs)}[kind]
    length = len(addresses) - offset if kind == "worker" else len(chiefs)
    if not 0 <= index < length:
        raise LookupError(f"no task {index} of type {kind!r}")
    return str(addresses[0]), len(addresses), offset + index
