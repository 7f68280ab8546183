"""A variable's value on its way between the two views."""

from __future__ import annotations

from typing import Any

from jax import lax

from distjax.errors import LocalityError, message
from distjax.placement.topology import Topology
from distjax.replica.global_value import GlobalValue, stack_replicas
from distjax.variables.layout import PartitionedLayout


def replica_view(variable: Any, value: Any) -> GlobalValue:
    """Returns what the replicas hold of a value in global form."""
    if isinstance(variable.layout, PartitionedLayout):
        return GlobalValue(variable.layout.stack(value), True)
    return GlobalValue(value, variable.policy.stacked)


def global_view(variable: Any, value: GlobalValue, topology: Topology) -> Any:
    """Returns the global form of what the replicas hold.

    Raises:
      LocalityError: the variable is mirrored and the value may differ.
    """
    if variable.policy.stacked:
        return stack_replicas(value, topology)
    if isinstance(variable.layout, PartitionedLayout):
        return variable.layout.join(stack_replicas(value, topology))
    if not value.varying:
        return value.array
    if topology.num_replicas == 1:
        return lax.squeeze(value.array, (0,))
    raise LocalityError(
        message(
            f"variable {variable.name!r} needs a value that is equal on every replica",
            got="a value that differs per replica",
            why="it is mirrored: its copies would diverge",
            fix="reduce the value before it is written: ctx.all_reduce('mean', x)",
        )
    )
