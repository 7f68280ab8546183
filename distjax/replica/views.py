"""A variable's value on its way between the two views."""

from __future__ import annotations

from typing import Any

from jax import lax

from distjax.errors import LocalityError, explain
from distjax.placement.topology import Topology
from distjax.replica.located import Located, stacked
from distjax.variables.layout import PartitionedLayout


def replica_view(variable: Any, value: Any) -> Located:
    """Returns what the replicas hold of a value in global form."""
    if isinstance(variable.layout, PartitionedLayout):
        return Located(variable.layout.stacked(value), True)
    return Located(value, variable.policy.stacked)


def global_view(variable: Any, value: Located, topology: Topology) -> Any:
    """Returns the global form of what the replicas hold.

    Raises:
      LocalityError: the variable is mirrored and the value may differ.
    """
    if variable.policy.stacked:
        return stacked(value, topology)
    if isinstance(variable.layout, PartitionedLayout):
        return variable.layout.joined(stacked(value, topology))
    if not value.differs:
        return value.array
    if topology.num_replicas == 1:
        return lax.squeeze(value.array, (0,))
    raise LocalityError(
        explain(
            f"variable {variable.name!r} needs a value that is equal on every replica",
            got="a value that differs per replica",
            why="it is mirrored: its copies would diverge",
            fix="reduce the value before it is written: ctx.all_reduce('mean', x)",
        )
    )
