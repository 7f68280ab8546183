"""RayServer: a server in a process of Ray's, as the coordinator sees it."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from distjax.servers.on_ray.hello import greet
from distjax.servers.on_ray.wire import from_wire, to_wire
from distjax.servers.server_contract import ServerSnapshot, Totals, lost_error
from distjax.typing import ArrayLike

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax.servers.on_ray.actors import Report, ServerActor

_T = TypeVar("_T")

#: So many closures that are over are told to a server at once.
_TOLD_AT_ONCE = 8


class RayServer:
    """A server in a process of Ray's.

    Args:
      number: which of the strategy's.
      make: makes a process for the server of a number.

    Attributes:
      actor: its process.
      platform: that it runs on.
    """

    def __init__(self, number: int, make: Callable[[int], ActorHandle[ServerActor]]):
        self.number = number
        self._make = make
        self.actor = make(number)
        self.is_lost = False
        self.platform = "cpu"
        self._pid = 0
        self._over: collections.deque[int] = collections.deque()
        self._report: Report | None = None  # the latest
        self._keys: set[str] = set()  # of variables that there are
        self._removed: collections.deque[str] = collections.deque()  # keys, not yet forgotten

    def greet(self) -> None:
        """Waits until its process has started.

        Raises:
          ClusterError: it has not, or is of no use here.
        """
        hello = greet(f"server {self.number}", self.actor)
        self._pid, self.platform = hello.pid, hello.platform

    @property
    def pid(self) -> int:
        """The process that it is in."""
        return self._pid

    @property
    def version(self) -> int:
        """How many writes it has seen; the latest that is known of one that is lost."""
        return self._look().version

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return self._look().nbytes

    @property
    def num_kept(self) -> int:
        """The number of closures of which something is remembered."""
        return self._look().num_kept

    def read_totals(self) -> Totals:
        """Returns what has been asked of it."""
        return self._look().totals

    def create(self, key: str, value: ArrayLike) -> None:
        """Gives a new variable its value."""
        self.call("create", key, *to_wire([jnp.asarray(value)]))
        self._keys.add(key)

    def remove(self, keys: Iterable[str]) -> None:
        """Forgets values whose variables are gone, when the server is next asked for anything.

        Takes no lock, and does not call Ray: a finalizer calls it.
        """
        self._removed.extend(keys)

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        """Returns the version, and the values that are there then."""
        version, sent = self.call("read", keys, is_pull=False)
        return version, from_wire(sent)

    def write(self, key: str, value: ArrayLike) -> int:
        """Replaces a value, outside of closures; returns the version that this makes."""
        return self.call("write", key, *to_wire([jnp.asarray(value)]))

    def mark_done(self, closure: int) -> None:
        """Forgets a closure that is over, soon: several are told at once."""
        self._over.append(closure)
        if len(self._over) >= _TOLD_AT_ONCE:
            self._tell()

    def snapshot(self) -> ServerSnapshot:
        """Returns a copy of all there is."""
        version, values = self.call("snapshot")
        # What has come lies in Ray's store, where there may be little room for long.
        with jax.enable_x64(True):
            arrays = [jnp.array(x, copy=True) for x in from_wire(list(values.values()))]
        return ServerSnapshot(version, dict(zip(values, arrays, strict=True)))

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        """Goes back to a snapshot, in a new process where the old one is lost."""
        if self._is_gone():
            self._over.clear()
            self.actor = self._make(self.number)
            self.greet()
            self.is_lost = False
        held = {key: value for key, value in snapshot.values.items() if key in self._keys}
        values = dict(zip(held, to_wire(held.values()), strict=True))
        self.call("restore", snapshot.version, values, num_closures)

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """Returns what a method of the process returns, and raises what it raises there.

        Raises:
          ServerLostError: the process has died.
        """
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if self.is_lost:
            raise lost_error(self.number)
        self._tell()
        try:
            return ray.get(getattr(self.actor, method).remote(*args, **kwargs))
        except RayActorError as error:
            self.is_lost = True
            raise lost_error(self.number) from error
        except RayTaskError as error:
            raise error.cause from None

    def _tell(self) -> None:
        over = _drain(self._over)
        if over and not self.is_lost:
            self.actor.mark_done.remote(over)
        removed = _drain(self._removed)
        self._keys.difference_update(removed)
        if removed and not self.is_lost:
            self.actor.remove.remote(removed)

    def _look(self) -> Report:
        from distjax.servers.on_ray.actors import Report

        try:
            self._report = self.call("report")
        except Exception:
            if not self.is_lost:
                raise
        return self._report or Report(0, 0, 0, Totals(), 0)

    def _is_gone(self) -> bool:
        self._look()
        return self.is_lost


def _drain(items: collections.deque[_T]) -> list[_T]:
    """Takes all that is there; other threads may take and add at the same time."""
    taken: list[_T] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(items.popleft())
    return taken
