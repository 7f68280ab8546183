"""Orders to a worker's Ray process, and their outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from distjax.context.thread_settings import ProgramModes
from distjax.servers.elements import Place
from distjax.servers.on_ray.failures import Failed
from distjax.servers.on_ray.wire import OnWire


@dataclasses.dataclass(frozen=True)
class Order:
    """An order to a worker to run an attempt.

    Attributes:
      plan: its number.
      epoch: the epoch of the servers; replacing a server begins a new one.
      closure: the number of the closure.
      attempt: 1, 2, ...
      arrays: the flat arguments; a `Place` for an array of an element.
      modes: the JAX modes in effect where the closure was scheduled.
    """

    plan: int
    epoch: int
    closure: int
    attempt: int
    arrays: Sequence[OnWire | Place]
    modes: ProgramModes


@dataclasses.dataclass(frozen=True)
class Done:
    """The result of an attempt: results, and versions by server."""

    results: Sequence[OnWire]
    versions: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class ServerGone:
    """A server no longer answers."""

    server: int


class Unknown:
    """The worker does not know an order's plan, servers or data: see `WorkerActor.add_plan`."""


class Stopped(Exception):
    """The closure is no longer wanted."""


#: The result of a call to a worker; None: continue.
Outcome = Done | Failed | ServerGone | Unknown | None
