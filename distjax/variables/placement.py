"""Where the storage of a strategy's variables lives."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from distjax.placement.topology import Topology
from distjax.variables.layout import Layout, StackedLayout, WholeLayout
from distjax.variables.policy import (
    PLAIN,
    Policy,
    VariableAggregation,
    VariableSynchronization,
    policy_for,
)


class VariablePlacement(Protocol):
    """The part of a strategy that decides how its variables are stored."""

    def policy(
        self,
        modes: tuple[VariableSynchronization, VariableAggregation],
        dtype: Any,
        name: str,
    ) -> Policy:
        """Returns what a variable of these modes does when read and written."""
        ...

    def layout(
        self, policy: Policy, shape: tuple[int, ...], dtype: Any, beside: Any = None
    ) -> Layout:
        """Returns how a new variable is stored.

        Args:
          policy: what it does when read and written.
          shape: its shape.
          dtype: its dtype.
          beside: the variable that it is colocated with, or None.
        """
        ...

    def reduction_layout(self, variable: Any) -> Layout:
        """Returns how a value reduced to the devices of `variable` is laid out."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainPlacement:
    """One copy, without synchronization, on one device (None: the default one)."""

    device: jax.Device | None = None

    def policy(self, modes: Any, dtype: Any, name: str) -> Policy:
        """Returns the policy of a plain variable, whatever its modes."""
        return PLAIN

    def layout(
        self, policy: Policy, shape: tuple[int, ...], dtype: Any, beside: Any = None
    ) -> Layout:
        """Returns the device's layout."""
        device = self.device
        return WholeLayout(None if device is None else jax.sharding.SingleDeviceSharding(device))

    def reduction_layout(self, variable: Any) -> Layout:
        """Returns the variable's own layout."""
        return variable.layout


@dataclasses.dataclass(frozen=True)
class MirroredPlacement:
    """A copy on each replica; components [R, ...] for sync-on-read variables."""

    topology: Topology

    def policy(
        self,
        modes: tuple[VariableSynchronization, VariableAggregation],
        dtype: Any,
        name: str,
    ) -> Policy:
        """Returns the row of the policy table."""
        return policy_for(modes, dtype, name)

    def layout(
        self, policy: Policy, shape: tuple[int, ...], dtype: Any, beside: Any = None
    ) -> Layout:
        """Returns `P(replica)` for components, `P()` for copies."""
        if policy.stacked:
            return StackedLayout(self.topology)
        return WholeLayout(self.topology.mirrored, self.topology.num_replicas)

    def reduction_layout(self, variable: Any) -> Layout:
        """Returns the layout of a mirrored value."""
        return WholeLayout(self.topology.mirrored, self.topology.num_replicas)
