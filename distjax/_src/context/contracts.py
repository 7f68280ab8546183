"""The strategy interface as seen by code that gets a strategy from the context.

These are Protocols because that code lies below the strategies. Floors that need more of a
strategy declare it themselves (`ExtendedForVariables` in `variables.variable`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from distjax._src.placement.per_replica import PerReplica
from distjax._src.placement.topology import Topology
from distjax._src.typing import (
    ArrayLike,
    AxisLike,
    DTypeLike,
    KeywordArgs,
    PositionalArgs,
    PyTree,
    ReduceOpLike,
    VariableModes,
)

#: The devices where a value is needed: those of a variable, array or PerReplica, or named
#: devices; None: all workers.
Destinations: TypeAlias = (
    "VariableLike | ArrayLike | PerReplica | jax.Device | str | Sequence[jax.Device | str] | None"
)


class StrategyLike(Protocol):
    """A strategy; see `distjax.Strategy`."""

    @property
    def extended(self) -> ExtendedLike:
        """The extended interface."""
        ...

    @property
    def num_replicas_in_sync(self) -> int: ...
    def run(
        self, fn: Callable[..., PyTree], args: PositionalArgs = (), kwargs: KeywordArgs = None
    ) -> PyTree: ...
    def reduce(
        self,
        op: ReduceOpLike,
        value: PyTree,
        axis: AxisLike = None,
        mask: PyTree = None,
    ) -> PyTree: ...


class VariableLike(Protocol):
    """A variable as the context needs it; see `distjax.Variable`."""

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that owns it."""
        ...


class ExtendedLike(Protocol):
    """A strategy's `extended`; see the methods of `distjax.StrategyExtended`."""

    is_default: bool
    wraps: bool

    @property
    def strategy(self) -> StrategyLike:
        """The strategy that this extends."""
        ...

    @property
    def topology(self) -> Topology: ...
    @property
    def num_replicas(self) -> int: ...
    @property
    def axis_name(self) -> str: ...
    @property
    def public_axis_name(self) -> str | None: ...
    @property
    def worker_devices(self) -> tuple[jax.Device, ...]: ...
    def pause_writers(self) -> AbstractContextManager[None]: ...
    def place_arguments(self, tree: PyTree) -> PyTree: ...
    def broadcast_to(self, value: PyTree, destinations: Destinations = None) -> PyTree: ...
    def create_variable(
        self,
        initial_value: PyTree,
        *,
        trainable: bool | None,
        name: str,
        dtype: DTypeLike | None,
        modes: VariableModes,
        sharding: PartitionSpec | NamedSharding | None = None,
    ) -> Any: ...
