"""The array of a variable at a server: every read fetches it, every write sends it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

from distjax import jax_compat
from distjax.errors import UnsupportedError, message
from distjax.placement.transfer import transfer
from distjax.servers.server_contract import ParameterServer
from distjax.variables.storage import SteppedArrays, Stored, StoredArray
from distjax.variables.stored_variable import StoredVariable


class ServerStorage(StoredArray):
    """Where the array of a variable is: at a server, under a key.

    Args:
      name: the name of the variable, for errors.
      lock: of the strategy's variables.
      key: what the servers know the variable by.
      servers: those that have it; the first one is asked.
      device: where fetched values come to lie.
    """

    __slots__ = ("_device", "_is_made", "_servers", "key")

    def __init__(
        self,
        name: str,
        lock: threading.RLock,
        key: str,
        servers: Sequence[ParameterServer],
        device: jax.Device,
    ):
        super().__init__(name, lock)
        self.key = key
        self._servers, self._device = servers, device
        self._is_made = False

    def read(self) -> Stored | None:
        """Returns the value that the server has now; None before it has one."""
        if not self._is_made:
            return None
        with jax_compat.outside_traces():
            _, (value,) = self._servers[0].read([self.key])
            return transfer(value, SingleDeviceSharding(self._device))

    def require_made(self) -> None:
        """Raises a ContextError where there is no value; fetches none."""
        if not self._is_made:
            self.require()

    def require_present(self) -> None:
        """Does nothing: servers are always there."""

    def _put(self, array: Stored | None) -> None:
        self._swaps += 1
        if isinstance(array, jax.Array):
            for server in self._servers:
                (server.write if self._is_made else server.create)(self.key, array)
        self._is_made = isinstance(array, jax.Array)

    def move_to(self, stepped: SteppedArrays, index: int) -> None:
        """Raises: a program of several variables would write them all here.

        Raises:
          UnsupportedError: always.
        """
        raise UnsupportedError(
            message(
                f"variable {self.name!r} needs to be written by a replica function, or by assign",
                got="a write in a compiled function of cross-replica code (dj.jit, or an optimizer "
                "outside of a replica function)",
                why="it lives at a parameter server, and only the merges of a replica function "
                "are sent there",
                fix="strategy.run(step, args) or coordinator.schedule(step, args), with the write "
                "in step; outside of functions v.assign(x)",
            )
        )


def key_of(variable: StoredVariable) -> str:
    """Returns what the servers know a variable by."""
    assert isinstance(variable.stored, ServerStorage), f"{variable.name!r} is at no server"
    return variable.stored.key
