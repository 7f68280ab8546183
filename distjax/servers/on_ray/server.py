"""RayServer: a server in a Ray process, as the coordinator sees it."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from distjax.context.thread_settings import ProgramModes
from distjax.servers.on_ray.startup import wait_for_start
from distjax.servers.on_ray.wire import OnWire, from_wire, to_wire
from distjax.servers.server_contract import ServerSnapshot, Totals, lost_error
from distjax.typing import ArrayLike

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax.servers.on_ray.server_actor import Report, ServerActor

_T = TypeVar("_T")

#: How many finished closures are reported to a server at once.
_TOLD_AT_ONCE = 8


class RayServer:
    """A server in a Ray process.

    Args:
      number: its number in the strategy.
      make: creates a process for the server with a number.

    Attributes:
      actor: its process.
      num_processes: how many it has had.
      pid: the pid of its process.
      platform: its JAX platform.
    """

    def __init__(self, number: int, make: Callable[[int], ActorHandle[ServerActor]]):
        self.number = number
        self._make = make
        self.actor = make(number)
        self.num_processes = 1
        self.is_lost = False
        self.platform = "cpu"
        self.pid = 0
        self._over: collections.deque[int] = collections.deque()
        self._report: Report | None = None  # the latest
        self._keys: set[str] = set()  # of current variables
        self._removed: collections.deque[str] = collections.deque()  # keys still to be dropped

    def wait_for_start(self) -> None:
        """Waits until its process has started.

        Raises:
          ClusterError: it has not started, or is not usable.
        """
        info = wait_for_start(f"server {self.number}", self.actor)
        self.pid, self.platform = info.pid, info.platform

    @property
    def version(self) -> int:
        """How many writes it has applied; the last known number if it is lost."""
        return self._look().version

    @property
    def nbytes(self) -> int:
        """The bytes of all values."""
        return self._look().nbytes

    @property
    def num_kept(self) -> int:
        """The number of closures with records."""
        return self._look().num_kept

    def read_totals(self) -> Totals:
        """Returns the totals of its requests."""
        return self._look().totals

    def create(self, key: str, value: ArrayLike) -> None:
        """Gives a new variable its value."""
        self.call("create", key, *to_wire([jnp.asarray(value)]))
        self._keys.add(key)

    def remove(self, keys: Iterable[str]) -> None:
        """Drops values of dead variables, at the next request.

        Takes no lock, and does not call Ray, since a finalizer calls it.
        """
        self._removed.extend(keys)

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        """Returns the version, and the values at that version."""
        version, sent = self.call("read", keys, is_pull=False)
        return version, from_wire(sent)

    def write(self, values: Mapping[str, ArrayLike]) -> int:
        """Replaces values together, outside closures; returns the resulting version."""
        return self.call("write", _to_wire(values))

    def add(self, amounts: Mapping[str, ArrayLike]) -> int:
        """Adds to values together, outside closures; returns the resulting version."""
        return self.call("add", _to_wire(amounts), ProgramModes.of_this_thread())

    def mark_done(self, closure: int) -> None:
        """Drops a closure that is over, later: several are reported at once."""
        self._over.append(closure)
        if len(self._over) >= _TOLD_AT_ONCE:
            self._tell()

    def withdraw(self, closure: int) -> bool:
        """Rejects further pushes of a closure; returns whether it has changed a value."""
        return self.call("withdraw", closure)

    def snapshot(self) -> ServerSnapshot:
        """Returns a copy of all values."""
        version, values = self.call("snapshot")
        # Received values lie in Ray's store, which may have little room for long-lived ones.
        with jax.enable_x64(True):
            arrays = [jnp.array(x, copy=True) for x in from_wire(list(values.values()))]
        return ServerSnapshot(version, dict(zip(values, arrays, strict=True)))

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        """Goes back to a snapshot, in a new process if the old one is lost."""
        self._look()
        if self.is_lost:
            self.actor = self._make(self.number)
            self.num_processes += 1  # last: whoever sees the number sees the process
            self.wait_for_start()
            self.is_lost = False
        held = {key: value for key, value in snapshot.values.items() if key in self._keys}
        values = dict(zip(held, to_wire(held.values()), strict=True))
        self.call("restore", snapshot.version, values, num_closures)

    def call(self, method: str, *args: object, **kwargs: object) -> Any:
        """Returns the result of the process's method, or raises its exception.

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
        over = drain(self._over)
        if over and not self.is_lost:
            self.actor.mark_done.remote(over)
        removed = drain(self._removed)
        self._keys.difference_update(removed)
        if removed and not self.is_lost:
            self.actor.remove.remote(removed)

    def _look(self) -> Report:
        from distjax.servers.on_ray.server_actor import Report

        try:
            self._report = self.call("report")
        except Exception:
            if not self.is_lost:
                raise
        return self._report or Report(0, 0, 0, Totals(), ())


def _to_wire(values: Mapping[str, ArrayLike]) -> dict[str, OnWire]:
    return dict(zip(values, to_wire(map(jnp.asarray, values.values())), strict=True))


def drain(items: collections.deque[_T]) -> list[_T]:
    """Takes all items; other threads may take and add at the same time."""
    taken: list[_T] = []
    with contextlib.suppress(IndexError):
        while True:
            taken.append(items.popleft())
    return taken
