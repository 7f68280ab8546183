"""The contracts: what runs closures and holds the servers, and a strategy that has both."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from distjax.placement.topology import Topology
from distjax.servers.elements import Argument, Elements, NumberedElements
from distjax.servers.plan import StepPlan
from distjax.servers.server import ParameterServer
from distjax.typing import PyTree


class WorkerDied(Exception):
    """The worker is lost; any worker may retry the closures it had in hand.

    Args:
      reason: what is known about the loss.
      has_begun: whether the closure may have begun; False: it was still waiting for
        another one that the worker had in hand.
    """

    def __init__(self, reason: object = "", *, has_begun: bool = True):
        super().__init__(str(reason))
        self.has_begun = has_begun


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """An attempt at a closure, as passed to a worker.

    Attributes:
      closure: its number.
      attempt: 1, 2, ...
      plan: the plan to run.
      arrays: the flat arguments; a `RemoteArray` where a worker has drawn and kept it.
      require_wanted: raises if the closure should end without its next push.
    """

    closure: int
    attempt: int
    plan: StepPlan
    arrays: Sequence[Argument]
    require_wanted: Callable[[], None]


class Ran(NamedTuple):
    """The result of an attempt; arrays may not be ready.

    Attributes:
      results: the flat results.
      versions: for each server: after the push, else as pulled.
      tokens: ready when everything has run.
    """

    results: tuple[jax.Array, ...]
    versions: tuple[int, ...]
    tokens: tuple[jax.Array, ...] = ()

    def wait(self) -> Ran:
        """Waits until everything has run."""
        jax.block_until_ready((self.results, self.tokens))
        return self


class Running(Protocol):
    """An attempt that a worker has begun: a `Ran`, or a handle that becomes one."""

    def wait(self) -> Ran:
        """Waits until everything has run; raises as `Engine.run` does."""
        ...


@runtime_checkable
class Engine(Protocol):
    """Runs closures on workers, and holds the servers. The contract of all engines.

    Methods with a body are defaults for engines that need nothing there.

    Attributes:
      max_failures: how many workers one closure may lose before it is given up.
    """

    max_failures: int

    @property
    def servers(self) -> Sequence[ParameterServer]:
        """The servers, by number."""
        ...

    def start(
        self,
        workers: Sequence[Topology],
        server_devices: Sequence[jax.Device],
        max_staleness: int | None,
    ) -> None:
        """Creates the servers; called once, by the strategy.

        Args:
          workers: the devices of each worker; worker i has entry i modulo their number.
          server_devices: one for each server.
          max_staleness: the bound on pushes by others between a pull and its push; None: no bound.
        """
        ...

    def run(self, worker: int, task: Task) -> Running:
        """Pulls, computes and pushes; called on the worker's thread.

        Raises:
          WorkerDied: the worker is lost; the next call finds a new one in its place.
          ServerLostError: a server is lost.
        """
        ...

    def admit(self, plan: StepPlan) -> None:
        """Raises if workers or servers cannot run a plan; called before queueing."""

    def open_data(self, worker: int, make: Callable[[], Iterable[Any]]) -> NumberedElements:
        """Returns the elements of the dataset ``make()``, made in the worker's process."""
        return Elements(make)

    def prepare(self, worker: int, is_wanted: Callable[[], bool]) -> bool:
        """Returns whether a worker is ready to run closures; waits for it while it is wanted."""
        return True

    def end_worker(self, worker: int) -> None:
        """Releases a worker that has nothing in hand."""

    def name_devices(self, home: Topology) -> tuple[str, ...]:
        """Returns the names of a worker's devices, which are those that `start` was given."""
        return tuple(map(str, home.devices))

    def pid_of(self, worker: int) -> int | None:
        """Returns the pid of a worker's process, or None if it has none yet."""
        return os.getpid()


@runtime_checkable
class ServerStrategy(Protocol):
    """A strategy with workers and servers.

    Attributes:
      engine: runs workers and servers.
    """

    engine: Engine

    @property
    def num_workers(self) -> int:
        """The initial number of workers."""
        ...

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of each worker."""
        ...

    def cut_step(
        self, fn: Callable[..., Any], args: Sequence[PyTree], kwargs: Mapping[str, PyTree] | None
    ) -> tuple[StepPlan, Sequence[jax.Array | np.ndarray]]:
        """Returns the plan of a step, traced the first time, and its flat arguments."""
        ...
