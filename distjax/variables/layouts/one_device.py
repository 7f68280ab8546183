"""The layout of one value on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from distjax.placement import topology as kinds
from distjax.variables.layouts.local_form import WHOLE


@dataclasses.dataclass(frozen=True)
class OneDeviceLayout:
    """One value [...] on one device (None: JAX's default device, uncommitted)."""

    device: jax.Device | None = None
    kind = kinds.MIRRORED
    num_copies = 1
    local_form = WHOLE
    hands_out_copies = False

    def __str__(self) -> str:
        return "mirrored"

    @property
    def sharding(self) -> Sharding | None:
        """The device; None: JAX's default device, uncommitted."""
        return None if self.device is None else SingleDeviceSharding(self.device)

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns `stored`."""
        return stored

    def constrain(self, stored: jax.Array) -> jax.Array:
        """Returns `stored`: the program runs on the device."""
        return jnp.asarray(stored)

    def unencoded(self, shape: tuple[int, ...]) -> OneDeviceLayout:
        """Returns this layout."""
        return self
