"""A server in a Ray process: as the coordinator sees it, and what runs there."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from distjax.context.thread_settings import ProgramModes
from distjax.servers.on_ray.processes import (
    ProcessInfo,
    describe_this_process,
    drain,
    wait_for_start,
)
from distjax.servers.on_ray.wire import (
    OnWire,
    arrives_as,
    for_programs,
    from_wire,
    to_wire,
)
from distjax.servers.plan import Program
from distjax.servers.server import ParameterServer, Report, Server, ServerSnapshot, lost_error
from distjax.typing import ArrayLike, PyTree

if TYPE_CHECKING:
    from ray.actor import ActorHandle

#: How many finished closures are reported to a server at once.
_TOLD_AT_ONCE = 8


class RayServer(ParameterServer):
    """A server in a Ray process.

    Args:
      number: its number in the strategy.
      make: creates a process for the server with a number.

    Attributes:
      actor: its process.
      num_processes: how many it has had.
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
        self._report = Report()  # the latest
        self._keys: set[str] = set()  # of current variables
        self._removed: collections.deque[str] = collections.deque()  # keys still to be dropped

    def wait_for_start(self) -> None:
        """Waits until its process has started.

        Raises:
          ClusterError: it has not started, or is not usable.
        """
        info = wait_for_start(f"server {self.number}", self.actor)
        self.pid, self.platform = info.pid, info.platform

    def report(self) -> Report:
        try:
            self._report = self._ask("report")
        except Exception:
            if not self.is_lost:
                raise
        return self._report

    def create(self, key: str, value: ArrayLike) -> None:
        self._ask("create", key, jnp.asarray(value))
        self._keys.add(key)

    def remove(self, keys: Iterable[str]) -> None:
        self._removed.extend(keys)  # a finalizer may not call Ray

    def read(self, keys: Sequence[str]) -> tuple[int, list[jax.Array]]:
        return self._ask("read", keys)

    def write(self, values: Mapping[str, ArrayLike]) -> int:
        return self._ask("write", {key: jnp.asarray(x) for key, x in values.items()})

    def add(self, amounts: Mapping[str, ArrayLike]) -> int:
        values = {key: jnp.asarray(x) for key, x in amounts.items()}
        return self._ask("add", values, modes=ProgramModes.of_this_thread())

    def mark_done(self, closure: int) -> None:
        self._over.append(closure)
        if len(self._over) >= _TOLD_AT_ONCE:
            self._tell()

    def withdraw(self, closure: int) -> bool:
        return self._ask("withdraw", closure)

    def snapshot(self) -> ServerSnapshot:
        snapshot: ServerSnapshot = self._ask("snapshot")
        # Received values lie in Ray's store, which may have little room for long-lived ones.
        with jax.enable_x64(True):
            copies = {key: jnp.array(x, copy=True) for key, x in snapshot.values.items()}
        return ServerSnapshot(snapshot.version, copies)

    def restore(self, snapshot: ServerSnapshot, num_closures: int) -> None:
        self.report()  # a process that has died unseen
        if self.is_lost:
            self.actor = self._make(self.number)
            self.num_processes += 1  # last: whoever sees the number sees the process
            self.wait_for_start()
            self.is_lost = False
        held = {key: value for key, value in snapshot.values.items() if key in self._keys}
        self._ask("restore", ServerSnapshot(snapshot.version, held), num_closures)

    def call(self, method: str, *args: object) -> Any:
        """Returns the result of a method of its process, or raises its exception.

        Raises:
          ServerLostError: the process has died.
        """
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        if self.is_lost:
            raise lost_error(self.number)
        self._tell()
        try:
            return ray.get(getattr(self.actor, method).remote(*args))
        except RayActorError as error:
            self.is_lost = True
            raise lost_error(self.number) from error
        except RayTaskError as error:
            raise error.cause from None

    def _ask(self, method: str, *args: object, modes: ProgramModes | None = None) -> Any:
        """Returns the result of a method of the `Server` in its process: see `call`."""
        return from_wire(self.call("ask", method, to_wire(args), modes))

    def _tell(self) -> None:
        over, removed = drain(self._over), drain(self._removed)
        self._keys.difference_update(removed)
        if (over or removed) and not self.is_lost:
            self.actor.tell.remote(over, removed)


class ServerActor:
    """A `Server` in its own process: no code of the user's.

    Ray runs one call at a time, so no value changes while it is sent. Only `compile` runs beside
    the others.

    Args:
      number: its number in the strategy.
      plans: its programs by plan and stage, for all current plans.
    """

    def __init__(self, number: int, plans: Mapping[int, Mapping[int, Program]]):
        self._device = jax.local_devices()[0]
        self._server = Server(number, self._device)
        self._plans = dict(plans)

    def describe_process(self) -> ProcessInfo:
        return describe_this_process()

    def add_plan(self, plan: int, programs: Mapping[int, Program]) -> None:
        """Stores the programs of a plan, by stage."""
        self._plans[plan] = programs

    def drop_plans(self, plans: Iterable[int]) -> None:
        """Drops plans that the coordinator no longer has."""
        for plan in plans:
            self._plans.pop(plan, None)

    def plans(self) -> list[int]:
        """Returns the numbers of the plans that it has."""
        return list(self._plans)

    def ask(self, method: str, args: PyTree, modes: ProgramModes | None) -> PyTree:
        """Returns the result of a method of `ParameterServer`."""
        with modes() if modes else contextlib.nullcontext(), jax.enable_x64(True):
            # 64 bits, since values only pass through.
            result = getattr(self._server, method)(*from_wire(args, self._device))
            return to_wire(result)

    def tell(self, over: Iterable[int], removed: Iterable[str]) -> None:
        """Drops closures that are over, and values of dead variables."""
        for closure in over:
            self._server.mark_done(closure)
        self._server.remove(removed)

    def pull(self, keys: Sequence[str]) -> tuple[int, list[OnWire]]:
        """Returns the version, and the values at that version, for a worker."""
        with jax.enable_x64(True):
            version, values = self._server.pull(keys, None)
            return version, to_wire(values)

    def compile(
        self, plan: int, stage: int, names: tuple[Sequence[str], Sequence[str]], modes: ProgramModes
    ) -> None:
        """Compiles a push, while others are applied: see `Server.compile`."""
        program, (takes, writes) = self._plans[plan][stage], names
        here = SingleDeviceSharding(self._device)
        arrays = [arrives_as(aval, here) for aval in program.avals[len(takes) :]]
        with modes():
            self._server.compile(program, takes, writes, arrays)

    def push(
        self,
        plan: int,
        stage: int,
        closure: int,
        attempt: int,
        names: tuple[Sequence[str], Sequence[str]],
        arrays: Sequence[OnWire],
        pulled: int | None,
        modes: ProgramModes,
    ) -> tuple[int, list[OnWire]]:
        """Returns version and answers of `Server.push`."""
        operands = for_programs(arrays, self._device)
        program = self._plans[plan][stage]
        with modes():
            answer = self._server.push(
                closure, stage, attempt, program, *names, operands, pulled=pulled
            )
        return answer.version, to_wire(answer.arrays)


def make_server(
    options: Mapping[str, Any], number: int, plans: Mapping[int, Mapping[int, Program]]
) -> ActorHandle[ServerActor]:
    """Returns a new process of a server."""
    import ray

    ray.method(concurrency_group="compiling")(ServerActor.compile)
    given: Any = {**options, "concurrency_groups": {"compiling": 1}}
    remote: Any = ray.remote(**given)
    return remote(ServerActor).remote(number, plans)
