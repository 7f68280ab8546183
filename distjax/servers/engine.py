"""Engine: who runs closures, and where servers are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from distjax.servers.plan import Plan
from distjax.servers.store import Server


class WorkerDied(Exception):
    """The worker is lost: what it had in hand is tried again, by any worker."""


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """An attempt at a closure, as a worker gets it.

    Attributes:
      closure: its number.
      attempt: 1, 2, ...
      plan: what to do.
      arrays: the flat arguments.
      require_wanted: raises if the closure is to end without its next push.
    """

    closure: int
    attempt: int
    plan: Plan
    arrays: Sequence[jax.Array | np.ndarray]
    require_wanted: Callable[[], None]


class Ran(NamedTuple):
    """What an attempt came to; arrays may not be ready.

    Attributes:
      results: the flat results.
      versions: of each server: after the push, else as pulled.
      tokens: ready when all has run.
    """

    results: tuple[jax.Array, ...]
    versions: tuple[int, ...]
    tokens: tuple[jax.Array, ...]


@runtime_checkable
class Engine(Protocol):
    """Runs closures on workers, and holds the servers: the contract of all engines.

    Attributes:
      max_failures: so many workers may be lost in one closure before it is given up.
    """

    max_failures: int

    @property
    def servers(self) -> Sequence[Server]:
        """The servers, by number."""
        ...

    def start(
        self,
        worker_devices: Sequence[jax.Device],
        server_devices: Sequence[jax.Device],
        max_staleness: int | None,
    ) -> None:
        """Makes the servers; once, by the strategy.

        Args:
          worker_devices: worker i runs on the device i, counted around.
          server_devices: one for each server.
          max_staleness: a bound on the pushes of others between a pull and its push.
        """
        ...

    def run(self, worker: int, task: Task) -> Ran:
        """Pulls, computes and pushes; called on a thread of the worker's.

        Raises:
          WorkerDied: the worker is lost; the next call finds a new one in its place.
          ServerLostError: a server is.
        """
        ...
