"""A checkpoint's description of the run that wrote it, as JSON."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any

import jax

import distjax
from distjax.checkpoint.leaves import Leaf, VariableLeaf
from distjax.checkpoint.positions import gather_states
from distjax.checkpoint.specs import Spec
from distjax.cluster.job import Job
from distjax.context import frames
from distjax.errors import CheckpointError, message

#: Incremented when older versions can no longer read what is written.
FORMAT = 1


def describe(
    step: int, leaves: Iterable[Leaf], metrics: Mapping[str, float], joined: Job | None
) -> dict[str, Any]:
    """Returns versions, strategies, step, metrics and each key's contents, as JSON.

    Values that are not arrays (numbers, iterator states) are stored in it.

    Args:
      step: the step's number.
      leaves: the leaves of the tree.
      metrics: the metrics by name.
      joined: the job whose processes save together; None: one process.
    """
    leaves = tuple(leaves)
    values = {leaf.key: leaf.snapshot() for leaf in leaves if leaf.spec.form != "array"}
    states = {leaf.key: values[leaf.key] for leaf in leaves if leaf.spec.form == "state"}
    own = {x.value.strategy: None for x in leaves if isinstance(x, VariableLeaf)}
    strategies = list(own) or [frames.current().strategy]
    return {
        "format": FORMAT,
        "distjax": distjax.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "step": step,
        "metrics": dict(metrics),
        "strategies": [
            {"strategy": repr(s), "num_replicas": s.num_replicas_in_sync} for s in strategies
        ],
        "keys": {leaf.key: _describe_leaf(leaf) for leaf in leaves},
        "values": values | gather_states(joined, states),
    }


def _describe_leaf(leaf: Leaf) -> dict[str, Any]:
    setting = {"setting": leaf.setting} if leaf.setting else {}
    return {**leaf.spec.to_json(), "lives": leaf.lives, **setting}


def require_readable(description: Mapping[str, Any], where: str) -> None:
    """Raises a CheckpointError if a later version wrote what this one cannot read."""
    if description["format"] <= FORMAT:
        return
    raise CheckpointError(
        message(
            f"{where} needs a version of distjax that can read it",
            got=f"format {description['format']}, written by distjax {description['distjax']}",
            why=f"distjax {distjax.__version__} reads formats up to {FORMAT}. Nothing has been "
            "changed",
            fix=f"restore it with distjax {description['distjax']} or later",
        )
    )


def saved_settings(description: Mapping[str, Any]) -> dict[str, str]:
    """Returns the setting that each key's value depends on, of those that have one."""
    keys = description["keys"].items()
    return {key: entry["setting"] for key, entry in keys if "setting" in entry}


def saved_specs(description: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the spec of each key in a checkpoint's description."""
    return {key: Spec.from_json(entry) for key, entry in description["keys"].items()}
