"""Snapshot: what all servers had between two closures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from distjax.servers.per_worker import PerWorkerIterator
from distjax.servers.server_contract import ServerSnapshot
from distjax.servers.streams import Position


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Values and versions of all servers, at a moment when no closure was running.

    Attributes:
      closures: how many closures it holds.
      servers: what each server had.
      positions: where the iterators over per-worker data were, those that still exist.
    """

    closures: int
    servers: Sequence[ServerSnapshot]
    positions: Mapping[PerWorkerIterator, Sequence[Position]]

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the servers."""
        return tuple(server.version for server in self.servers)

    def __repr__(self) -> str:
        return f"Snapshot(closures={self.closures}, versions={self.versions})"
