"""ParameterServer: a server as the coordinator sees it, in any process."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import jax

from distjax.errors import ServerLostError, message
from distjax.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class ServerSnapshot:
    """The state of one server at some time.

    Attributes:
      version: its version.
      values: copies of the values, by key.
    """

    version: int
    values: Mapping[str, jax.Array]


@dataclasses.dataclass
class Totals:
    """Totals of the requests to a server.

    Attributes:
      staleness: how many writing pushes had each staleness.
      bytes_pulled: bytes of the values that workers read, and of the answers to pushes.
      bytes_pushed: bytes that workers sent.
    """

    staleness: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter[int]
    )
    bytes_pulled: int = 0
    bytes_pushed: int = 0


class ParameterServer(Protocol):
    """One parameter server, as the coordinator sees it; `Server` is an implementation.

    All members except the first four properties raise ServerLostError if it is lost.
    """

    @property
    def number(self) -> int:
        """Its number in the strategy."""
        ...

    @property
    def pid(self) -> int:
        """The pid of its process."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether it has lost its values and has not been restored since."""
        ...

    @property
    def version(self) -> int:
        """How many writes it has applied."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        ...

    @property
    def num_kept(self) -> int:
        """How many closures it keeps records of."""
        ...

    def read_totals(self) -> Totals:
        """Returns the totals of its requests."""
        ...

    def create(self, key: str, value: ArrayLike) -> None:
        """Gives a new variable its value."""
        ...

    def remove(self, keys: Iterable[str]) -> None:
        """Drops values of dead variables, later; a finalizer may call it."""
        ...

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        """Returns the version, and copies of the values at that version."""
        ...

    def write(self, values: Mapping[str, ArrayLike]) -> int:
        """Replaces values together, outside closures; returns the resulting version."""
        ...

    def add(self, amounts: Mapping[str, ArrayLike]) -> int:
        """Adds to values together, outside closures; returns the resulting version."""
        ...

    def mark_done(self, closure: int) -> None:
        """Drops a closure that is over, now or later, and rejects its further pushes."""
        ...

    def withdraw(self, closure: int) -> bool:
        """Rejects further pushes of a closure, at once; returns whether it has changed a value."""
        ...

    def snapshot(self) -> ServerSnapshot:
        """Returns a copy of all values."""
        ...

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        """Goes back to a snapshot; all closures with lower numbers are over."""
        ...


def add_totals(servers: Iterable[ParameterServer]) -> Totals:
    """Returns the combined totals of several servers."""
    each = [server.read_totals() for server in servers]
    return Totals(
        sum((totals.staleness for totals in each), start=collections.Counter[int]()),
        sum(totals.bytes_pulled for totals in each),
        sum(totals.bytes_pushed for totals in each),
    )


def lost_error(number: int, got: str = "a server that is lost") -> ServerLostError:
    """Returns the error for a server that has lost its values."""
    return ServerLostError(
        message(
            f"server {number} needs to have what a closure pulls and pushes",
            got=got,
            why="its values, and all that was applied since the last snapshot, went with it",
            fix="num_closures = coordinator.restore(), and go on from there; "
            "coordinator.snapshot() takes snapshots",
        )
    )
