"""What the coordinator asks of a server, in this process or in another."""

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
    """What one server had at a time.

    Attributes:
      version: its version.
      values: copies of the values, by key.
    """

    version: int
    values: Mapping[str, jax.Array]


@dataclasses.dataclass
class Totals:
    """What has been asked of a server, in all.

    Attributes:
      staleness: how many pushes that wrote were so stale.
      bytes_pulled: of values read by workers, and answers of pushes.
      bytes_pushed: of what workers sent.
    """

    staleness: collections.Counter[int] = dataclasses.field(
        default_factory=collections.Counter[int]
    )
    bytes_pulled: int = 0
    bytes_pushed: int = 0


class ParameterServer(Protocol):
    """One parameter server, as the coordinator sees it: `Server` is one.

    All methods but the first four properties raise ServerLostError where it is lost.
    """

    @property
    def number(self) -> int:
        """Which of the strategy's."""
        ...

    @property
    def pid(self) -> int:
        """The process that it is in."""
        ...

    @property
    def is_lost(self) -> bool:
        """Whether it has lost its values, and was not restored since."""
        ...

    @property
    def version(self) -> int:
        """How many writes it has seen."""
        ...

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        ...

    @property
    def num_kept(self) -> int:
        """The number of closures of which something is remembered."""
        ...

    def read_totals(self) -> Totals:
        """Returns what has been asked of it."""
        ...

    def create(self, key: str, value: ArrayLike) -> None:
        """Gives a new variable its value."""
        ...

    def remove(self, keys: Iterable[str]) -> None:
        """Forgets values whose variables are gone, soon; a finalizer may call it."""
        ...

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        """Returns the version, and copies of the values that are there then."""
        ...

    def write(self, key: str, value: ArrayLike) -> int:
        """Replaces a value, outside of closures; returns the version that this makes."""
        ...

    def mark_done(self, closure: int) -> None:
        """Forgets a closure that is over, and refuses what is still pushed for it."""
        ...

    def snapshot(self) -> ServerSnapshot:
        """Returns a copy of all there is."""
        ...

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        """Goes back to a snapshot; all closures of lower numbers are over."""
        ...


def add_totals(servers: Iterable[ParameterServer]) -> Totals:
    """Returns what has been asked of several servers."""
    each = [server.read_totals() for server in servers]
    return Totals(
        sum((totals.staleness for totals in each), start=collections.Counter[int]()),
        sum(totals.bytes_pulled for totals in each),
        sum(totals.bytes_pushed for totals in each),
    )


def lost_error(number: int, got: str = "a server that is lost") -> ServerLostError:
    """Returns the error of a server that has no values any more."""
    return ServerLostError(
        message(
            f"server {number} needs to have what a closure pulls and pushes",
            got=got,
            why="its values, and all that was applied since the last snapshot, went with it",
            fix="num_closures = coordinator.restore(), and go on from there; "
            "coordinator.snapshot() takes snapshots",
        )
    )
