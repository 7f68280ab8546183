"""Snapshot: the state of all servers between two closures."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

from distjax.servers.elements import Position
from distjax.servers.per_worker import PerWorkerIterator
from distjax.servers.server import ServerSnapshot
from distjax.servers.strategy_contract import ServerStrategy


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Values and versions of all servers, at a moment when no closure was running.

    Attributes:
      closures: how many closures it contains.
      servers: the state of each server.
      positions: the positions of iterators over per-worker data, as long as they are alive.
      strategy: the strategy of the servers, as long as it is alive.
    """

    closures: int
    servers: Sequence[ServerSnapshot]
    positions: weakref.WeakKeyDictionary[PerWorkerIterator, list[Position]]
    strategy: weakref.ref[ServerStrategy]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the servers."""
        return tuple(server.version for server in self.servers)

    def __repr__(self) -> str:
        return f"Snapshot(closures={self.closures}, versions={self.versions})"
