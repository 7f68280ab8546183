"""The array of a variable at servers: each read fetches it, each write sends it."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from distjax import jax_compat
from distjax.placement.transfer import transfer
from distjax.servers.cutting.sizes import num_bytes
from distjax.servers.placement import ServerLayout, ServerPlacement
from distjax.servers.server import ParameterServer
from distjax.variables.storage import RemoteStorage, Stored
from distjax.variables.stored_variable import StoredVariable


@dataclasses.dataclass(frozen=True)
class Part:
    """A variable's part at one server: all of it, or a shard of its rows.

    Attributes:
      variable: the name of the variable.
      name: the same, or `name/part_i` for a shard.
      key: its key at the servers.
      server: the number of its server; None: it is at every server.
      shape: the shape of the part.
      dtype: the dtype of the variable.
      start: the number of a shard's first row.
    """

    variable: str
    name: str
    key: str
    server: int | None
    shape: tuple[int, ...]
    dtype: Any
    start: int = 0

    @property
    def is_shard(self) -> bool:
        """Whether it is only part of the variable."""
        return self.name != self.variable

    @property
    def lives(self) -> str:
        """Where it is, in words."""
        return "at every server" if self.server is None else f"at server {self.server}"


def make_parts(variable: StoredVariable, number: int) -> tuple[Part, ...]:
    """Returns the parts of a new variable; `number` makes their keys unique."""
    layout, name, shape = variable.layout, variable.name, variable.shape
    assert isinstance(layout, ServerLayout), "as its placement says"
    if not layout.shards:
        return (Part(name, name, f"{name}#{number}", layout.server, shape, variable.dtype),)
    parts, start = [], 0
    for i, shard in enumerate(layout.shards):
        own, rows = f"{name}/part_{i}", (shard.num_rows, *shape[1:])
        parts.append(Part(name, own, f"{own}#{number}", shard.server, rows, variable.dtype, start))
        start += shard.num_rows
    return tuple(parts)


class ServerStorage(RemoteStorage):
    """The array of a variable at servers, each part under a key.

    Plans hold it, so that the values exist as long as a plan may run.

    Args:
      name: the name of the variable, for errors.
      lock: the lock of the strategy's variables.
      parts: the parts of the variable.
      servers: all servers of the strategy.
      placement: counts their bytes.
      device: where fetched values are placed.
    """

    __slots__ = ("_device", "_is_made", "_read_at", "_servers", "_written_at", "parts")

    def __init__(
        self,
        name: str,
        lock: threading.RLock,
        parts: tuple[Part, ...],
        servers: Sequence[ParameterServer],
        placement: ServerPlacement,
        device: jax.Device,
    ):
        super().__init__(name, lock)
        self.parts = parts
        everywhere = range(len(servers))
        homes = [
            (n, part)
            for part in parts
            for n in (everywhere if part.server is None else (part.server,))
        ]
        placement.add((n, num_bytes(part)) for n, part in homes)
        weakref.finalize(self, _remove, servers, placement, homes).atexit = False
        self._servers, self._device = servers, device
        self._read_at = _by_server((part.server or 0, part) for part in parts)
        self._written_at = _by_server(homes)
        self._is_made = False

    def read(self) -> Stored | None:
        """Returns the servers' current value; None before they have one."""
        if not self._is_made:
            return None
        with jax_compat.outside_traces():
            values = self._read_parts()
            return values[0] if len(values) == 1 else jnp.concatenate(values)

    def _read_parts(self) -> list[jax.Array]:
        """Returns the values of the parts; those at one server are of one version of it."""
        values: dict[str, jax.Array] = {}
        for number, parts in self._read_at.items():
            keys = [part.key for part in parts]
            values.update(zip(keys, self._servers[number].read(keys)[1], strict=True))
        here = SingleDeviceSharding(self._device)
        return [transfer(values[part.key], here) for part in self.parts]

    def add(self, amount: jax.Array) -> None:
        """Adds to the value, at each server in one operation."""
        self.require_made()
        self._swaps += 1
        with jax_compat.outside_traces():
            for number, parts in self._written_at.items():
                self._servers[number].add({part.key: _slice(amount, part) for part in parts})

    def require_made(self) -> None:
        """Raises a ContextError if there is no value, without fetching it."""
        if not self._is_made:
            self.require()

    def require_present(self) -> None:
        """Does nothing: servers are always there."""

    def _put(self, array: Stored | None) -> None:
        self._swaps += 1
        if isinstance(array, jax.Array):
            with jax_compat.outside_traces():
                self._send(array)
        self._is_made = isinstance(array, jax.Array)

    def _send(self, array: jax.Array) -> None:
        for number, parts in self._written_at.items():
            values = {part.key: _slice(array, part) for part in parts}
            if self._is_made:
                self._servers[number].write(values)
                continue
            for key, value in values.items():
                self._servers[number].create(key, value)


def _slice(array: jax.Array, part: Part) -> jax.Array:
    """Returns a part of the array of a variable."""
    whole = part.shape == array.shape
    return array if whole else array[part.start : part.start + part.shape[0]]


def _by_server(homes: Iterable[tuple[int, Part]]) -> Mapping[int, Sequence[Part]]:
    """Returns the parts at each server: what one operation there reads or writes."""
    found: dict[int, list[Part]] = {}
    for number, part in homes:
        found.setdefault(number, []).append(part)
    return found


def _remove(
    servers: Sequence[ParameterServer],
    placement: ServerPlacement,
    homes: Sequence[tuple[int, Part]],
) -> None:
    """Drops a variable from servers; lock-free, since a finalizer may interrupt any code."""
    for number, part in homes:
        servers[number].remove([part.key])
    placement.remove((number, num_bytes(part)) for number, part in homes)


def parts_of(variable: StoredVariable) -> tuple[Part, ...]:
    """Returns a variable's parts at the servers."""
    assert isinstance(variable.stored, ServerStorage), f"{variable.name!r} is at no server"
    return variable.stored.parts


def sizes_of(variable: StoredVariable) -> tuple[int, ...]:
    """Returns the number of rows of each shard of a variable; () if it is whole."""
    parts = parts_of(variable)
    return tuple(part.shape[0] for part in parts) if len(parts) > 1 else ()
