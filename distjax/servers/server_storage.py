"""The array of a variable at a server: every read fetches it, every write sends it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import jax
from jax.sharding import SingleDeviceSharding

from distjax import jax_compat
from distjax.placement.transfer import transfer
from distjax.servers.server_contract import ParameterServer
from distjax.variables.storage import Stored, StoredArray
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

    is_remote = True

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


def key_of(variable: StoredVariable) -> str:
    """Returns what the servers know a variable by."""
    assert isinstance(variable.stored, ServerStorage), f"{variable.name!r} is at no server"
    return variable.stored.key
