"""Where the storage of a strategy's variables lives."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
from jax.sharding import Sharding

from distjax.placement.topology import Topology
from distjax.variables.policy import (
    PLAIN,
    Policy,
    VariableAggregation,
    VariableSynchronization,
    policy_for,
)


class VariablePlacement(Protocol):
    """The part of a strategy that decides how its variables are stored."""

    num_components: int

    def policy(
        self,
        modes: tuple[VariableSynchronization, VariableAggregation],
        dtype: Any,
        name: str,
    ) -> Policy:
        """Returns what a variable of these modes does when read and written."""
        ...

    def sharding(self, policy: Policy) -> Sharding | None:
        """Returns where its storage lives; None: JAX's default device, uncommitted."""
        ...


@dataclasses.dataclass(frozen=True)
class PlainPlacement:
    """One copy, without synchronization, on one device (None: the default one)."""

    device: jax.Device | None = None
    num_components: int = 1

    def policy(self, modes: Any, dtype: Any, name: str) -> Policy:
        """Returns the policy of a plain variable, whatever its modes."""
        return PLAIN

    def sharding(self, policy: Policy) -> Sharding | None:
        """Returns the device's sharding."""
        return None if self.device is None else jax.sharding.SingleDeviceSharding(self.device)


@dataclasses.dataclass(frozen=True)
class MirroredPlacement:
    """A copy on each replica; components [R, ...] for sync-on-read variables."""

    topology: Topology

    @property
    def num_components(self) -> int:
        """R."""
        return self.topology.num_replicas

    def policy(
        self,
        modes: tuple[VariableSynchronization, VariableAggregation],
        dtype: Any,
        name: str,
    ) -> Policy:
        """Returns the row of the policy table."""
        return policy_for(*modes, dtype, name)

    def sharding(self, policy: Policy) -> Sharding:
        """Returns `P(replica)` for components, `P()` for copies."""
        return self.topology.per_replica if policy.stacked else self.topology.mirrored
