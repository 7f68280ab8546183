"""VariablePlacement: the part of a strategy that picks a layout for each variable."""

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
    """Anything with a variable's shape, dtype and layout."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def layout(self) -> Layout: ...


class VariablePlacement(Protocol):
    """The part of a strategy that decides where its variables are stored.

    If `synchronizes`, sync-on-read variables have one component per replica, wherever
    the other variables live.
    """

    @property
    def synchronizes(self) -> bool:
        """Whether a variable's synchronization and aggregation have an effect."""
        ...

    def layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, colocate_with: LaidOut | None = None
    ) -> Layout:
        """Returns the layout of a new variable with a single value.

        Args:
          shape: its shape.
          dtype: its dtype.
          colocate_with: the variable that it is colocated with, or None.
        """
        ...

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns the layout of a value reduced to the devices of `variable`.

        Args:
          variable: the variable, or anything laid out like one.

        The reduced value keeps its shape, so only `unencoded` of the returned layout is used.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PlainPlacement:
    """One copy, without synchronization, on one device (None: the default device)."""

    device: jax.Device | None = None
    synchronizes: bool = False

    def layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, colocate_with: LaidOut | None = None
    ) -> Layout:
        """Returns the single-device layout."""
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
        """Returns the mirrored layout, `P()`."""
        return MirroredLayout(self.topology)

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns the mirrored layout."""
        return MirroredLayout(self.topology)
