"""Engine: who runs closures, and where servers are."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from distjax.servers.plan import Plan
from distjax.servers.server_contract import ParameterServer


class WorkerDied(Exception):
    """The worker is lost: what it had in hand is tried again, by any worker.

    Args:
      reason: what is known of it.
      has_begun: whether the closure may have begun; False: it waited for another one, which
        the worker had in hand.
    """

    def __init__(self, reason: object = "", *, has_begun: bool = True):
        super().__init__(str(reason))
        self.has_begun = has_begun


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
    tokens: tuple[jax.Array, ...] = ()

    def wait(self) -> Ran:
        """Waits until all has run."""
        jax.block_until_ready((self.results, self.tokens))
        return self


class Running(Protocol):
    """An attempt that a worker has begun: a `Ran`, or what becomes one."""

    def wait(self) -> Ran:
        """Waits until all has run; raises as `Engine.run`."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Runs closures on workers, and holds the servers: the contract of all engines.

    What has a body is what an engine does that has nothing to do there.

    Attributes:
      max_failures: so many workers may be lost in one closure before it is given up.
    """

    max_failures: int

    @property
    def servers(self) -> Sequence[ParameterServer]:
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

    def run(self, worker: int, task: Task) -> Running:
        """Pulls, computes and pushes; called on a thread of the worker's.

        Raises:
          WorkerDied: the worker is lost; the next call finds a new one in its place.
          ServerLostError: a server is.
        """
        ...

    def admit(self, plan: Plan) -> None:
        """Raises where workers or servers could not run a plan: before anything is queued."""

    def require_data(self, at: str) -> None:
        """Raises where per-worker data cannot be drawn `at` a place."""

    def prepare(self, worker: int, is_wanted: Callable[[], bool]) -> bool:
        """Returns whether a worker is there to run closures; waits for it while it is wanted."""
        return True

    def end_worker(self, worker: int) -> None:
        """Lets go of a worker that has nothing in hand."""

    def pid_of(self, worker: int) -> int | None:
        """Returns the process that a worker is in; None: in none yet."""
        return os.getpid()
