"""Where the storage of a strategy's variables lives."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from distjax.placement.topology import Topology
from distjax.typing import DTypeLike
from distjax.variables.layouts.layout import Layout
from distjax.variables.layouts.mirrored import MirroredLayout
from distjax.variables.layouts.one_device import OneDeviceLayout


class LaidOut(Protocol):
    """What has the shape, dtype and layout of a variable."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def layout(self) -> Layout: ...


class VariablePlacement(Protocol):
    """The part of a strategy that decides where its variables are stored.

    A sync-on-read variable of a placement that synchronizes has a component per
    replica, wherever its other variables live.
    """

    @property
    def synchronizes(self) -> bool:
        """Whether a variable's synchronization and aggregation have an effect."""
        ...

    def layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, colocate_with: LaidOut | None = None
    ) -> Layout:
        """Returns how a new variable with one value is stored.

        Args:
          shape: its shape.
          dtype: its dtype.
          colocate_with: the variable that it is colocated with, or None.
        """
        ...

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns how a value reduced to the devices of `variable` is laid out.

        Args:
          variable: the variable, or what stands for one.

        The value is stored in no other form: of the layout returned, `unencoded`
        is what counts.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PlainPlacement:
    """One copy, without synchronization, on one device (None: the default one)."""

    device: jax.Device | None = None
    synchronizes: bool = False

    def layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, colocate_with: LaidOut | None = None
    ) -> Layout:
        """Returns the device's layout."""
        return OneDeviceLayout(self.device)

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns the variable's own layout."""
        return variable.layout


@dataclasses.dataclass(frozen=True)
class MirroredPlacement:
    """A copy on each replica."""

    topology: Topology
    synchronizes: bool = True

    def layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, colocate_with: LaidOut | None = None
    ) -> Layout:
        """Returns `P()`."""
        return MirroredLayout(self.topology)

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns the layout of a mirrored value."""
        return MirroredLayout(self.topology)
