"""Places each variable on the least loaded server, and shards on the servers in turn."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding, SingleDeviceSharding

from distjax import jax_compat
from distjax.errors import message
from distjax.typing import DTypeLike
from distjax.variables.layouts.local_form import WHOLE
from distjax.variables.partitioners import Partitioner, count_shards
from distjax.variables.variable_placement import LaidOut

OWNER = "ParameterServerStrategy"


@dataclasses.dataclass(frozen=True)
class Shard:
    """Some rows of a variable: the number of their server, and how many they are."""

    server: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class ServerLayout:
    """One value at a server, or in shards at several.

    Attributes:
      server: its number; None: a copy at every server, each counting its own pushes, as
        optimizers do for their steps.
      device: where values fetched from it are placed.
      shards: the rows of a partitioned variable, in order; the first are at `server`.
    """

    server: int | None
    device: jax.Device
    shards: tuple[Shard, ...] = ()
    num_copies = 1
    local_form = WHOLE
    hands_out_copies = True

    @property
    def kind(self) -> str:
        """Names the server, so that a variable and its slots have equal localities."""
        if self.shards:
            return f"in shards at servers {', '.join(str(s.server) for s in self.shards)}"
        return "at every server" if self.server is None else f"at server {self.server}"

    def __str__(self) -> str:
        return self.kind

    @property
    def sharding(self) -> Sharding:
        """The device of fetched values."""
        return SingleDeviceSharding(self.device)

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value` unchanged."""
        return value

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns `stored` unchanged."""
        return stored

    def constrain(self, stored: jax.Array) -> jax.Array:
        """Returns `stored`: only a server's programs give such a variable a value."""
        return jnp.asarray(stored)

    def unencoded(self, shape: tuple[int, ...]) -> ServerLayout:
        """Returns this layout."""
        return self

    def beside(self, shape: tuple[int, ...]) -> ServerLayout:
        """Returns a colocated variable's layout: in the same shards if it has as many rows."""
        num_rows = sum(shard.num_rows for shard in self.shards)
        return self if shape[:1] == (num_rows,) else dataclasses.replace(self, shards=())


@dataclasses.dataclass(frozen=True)
class AtEveryServer:
    """The colocation target of variables without an owner: they live at every server."""

    layout: ServerLayout
    shape: tuple[int, ...] = ()
    dtype: Any = jnp.float32


class ServerPlacement:
    """Puts each variable on the server with the fewest bytes, and shards on servers in turn.

    Args:
      num_servers: how many servers there are.
      device: where values fetched from them are placed.
      partitioner: the number of shards per axis of a variable; None: no variable is split.

    Attributes:
      synchronizes: False, since a server has one value, however many replicas a worker has.
      loads: the bytes of the variables at each server.
    """

    synchronizes = False

    def __init__(self, num_servers: int, device: jax.Device, partitioner: Partitioner | None):
        self.loads = [0] * num_servers
        self.at_every_server = AtEveryServer(ServerLayout(None, device))
        self._device, self._partitioner = device, partitioner
        self._lock = threading.Lock()
        self._removed: collections.deque[tuple[int, int]] = collections.deque()

    def layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, colocate_with: LaidOut | None = None
    ) -> ServerLayout:
        """Returns the layout of a new variable."""
        own = getattr(colocate_with, "layout", None)
        if isinstance(own, ServerLayout):
            return own.beside(tuple(shape))
        return self._place(self._rows(tuple(shape), dtype))

    def add(self, portions: Iterable[tuple[int, int]]) -> None:
        """Adds a new variable's (server number, bytes) portions to the loads."""
        with self._lock:
            self._forget_removed()
            for server, size in portions:
                self.loads[server] += size

    def remove(self, portions: Iterable[tuple[int, int]]) -> None:
        """Subtracts a dead variable's portions, later; lock-free, for finalizers."""
        self._removed.extend(portions)

    def _forget_removed(self) -> None:
        while self._removed:
            server, size = self._removed.popleft()
            self.loads[server] -= size

    def _rows(self, shape: tuple[int, ...], dtype: DTypeLike) -> list[int]:
        """Returns how many rows each shard has, more in the first ones; [1] for a whole variable.

        Raises:
          ValueError: the partitioner splits an axis other than the first.
        """
        if self._partitioner is None or not shape or jax_compat.is_key_dtype(dtype):
            return [1]
        counts = count_shards(OWNER, self._partitioner, shape, dtype)
        if any(count > 1 for count in counts[1:]):
            raise ValueError(_axis_text(counts, shape))
        n = min(counts[0], shape[0])
        return [shape[0] // n + (i < shape[0] % n) for i in range(n)] if n > 1 else [1]

    def _place(self, rows: Sequence[int]) -> ServerLayout:
        """Returns the layout of shards at the servers in turn, the least loaded first."""
        with self._lock:
            self._forget_removed()
            turns = sorted(range(len(self.loads)), key=self.loads.__getitem__)
        shards = tuple(Shard(turns[i % len(turns)], n) for i, n in enumerate(rows))
        return ServerLayout(turns[0], self._device, shards if len(shards) > 1 else ())

    def reduction_layout(self, variable: LaidOut) -> Any:
        """Returns the variable's own layout."""
        return variable.layout


def _axis_text(counts: Sequence[int], shape: tuple[int, ...]) -> str:
    return message(
        f"{OWNER}: partitioner needs to split the first axis only",
        got=f"{list(counts)} shards for shape {shape}",
        why="a server has some rows of a variable, from one to another",
        fix="partitioner=dj.parts.FixedShards(2), or a function that returns [2, 1, ...]",
    )
