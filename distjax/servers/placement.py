"""Which server a variable lives at: the one with the fewest bytes, unless it is told otherwise."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from distjax import jax_compat
from distjax.servers.sizes import num_bytes
from distjax.typing import DTypeLike
from distjax.variables.layouts.local_form import WHOLE
from distjax.variables.stored_variable import StoredVariable
from distjax.variables.variable_placement import LaidOut


@dataclasses.dataclass(frozen=True)
class ServerLayout:
    """One value at a server.

    Attributes:
      server: its number; None: a copy at every server, each with its own pushes counted, as
        optimizers keep for their steps.
      device: where values that are fetched from it come to lie.
    """

    server: int | None
    device: jax.Device
    num_copies = 1
    local_form = WHOLE
    hands_out_copies = True

    @property
    def kind(self) -> str:
        """Which server, so that a variable and its slots have equal localities."""
        return "at every server" if self.server is None else f"at server {self.server}"

    def __str__(self) -> str:
        return self.kind

    @property
    def sharding(self) -> Sharding:
        """The device of fetched values."""
        return SingleDeviceSharding(self.device)

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns `stored`."""
        return stored

    def constrain(self, stored: jax.Array) -> jax.Array:
        """Returns `stored`: no program but a server's gives such a variable a value."""
        return jnp.asarray(stored)

    def unencoded(self, shape: tuple[int, ...]) -> ServerLayout:
        """Returns this layout."""
        return self


@dataclasses.dataclass(frozen=True)
class NoVariable:
    """What variables are colocated with that belong to no other one: they live at every server."""

    layout: ServerLayout
    shape: tuple[int, ...] = ()
    dtype: Any = jnp.float32


class ServerPlacement:
    """Puts each new variable at the server that holds the fewest bytes.

    Args:
      num_servers: how many there are.
      device: where values that are fetched from them come to lie.

    Attributes:
      synchronizes: no: a worker has one replica, and a server one value.
      loads: the bytes of the variables at each server.
    """

    synchronizes = False

    def __init__(self, num_servers: int, device: jax.Device):
        self.loads = [0] * num_servers
        self.at_every_server = NoVariable(ServerLayout(None, device))
        self._device = device
        self._lock = threading.Lock()

    def layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, colocate_with: LaidOut | None = None
    ) -> ServerLayout:
        """Returns the layout of a new variable, and counts its bytes."""
        own = getattr(colocate_with, "layout", None)
        size = num_bytes(jax_compat.ShapedArray(shape, dtype))
        with self._lock:
            if not isinstance(own, ServerLayout):
                own = ServerLayout(self.loads.index(min(self.loads)), self._device)
            for server in range(len(self.loads)) if own.server is None else (own.server,):
                self.loads[server] += size
        return own

    def reduction_layout(self, variable: LaidOut) -> Any:
        """Returns the variable's own layout."""
        return variable.layout


def server_of(variable: StoredVariable) -> int | None:
    """Returns the number of the server that a variable lives at; None: it is at every one."""
    assert isinstance(variable.layout, ServerLayout), f"{variable.name!r} is at no server"
    return variable.layout.server
