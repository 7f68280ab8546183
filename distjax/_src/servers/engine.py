"""Engines: the contract of what runs closures and holds the servers; threads of this process.

An `Attempt` is what a worker does with a closure, on a thread or in its own process. A `Gate`
bounds how many pushes of others come between a pull and its push.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from distjax._src.placement import Topology
from distjax._src.servers.per_worker import Argument, Elements, NumberedElements
from distjax._src.servers.plan import (
    Executable,
    OnceEach,
    Push,
    Stage,
    StepPlan,
    count_writes,
    place,
    raises_for_values,
    sharding_of,
    shardings_of,
    writes,
)
from distjax._src.servers.server import Answer, ParameterServer, Server

# -- the contract -------------------------------------------------------------


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
      plan: the plan to run.
      arrays: the flat arguments; a `RemoteArray` where a worker has drawn and kept it.
    """

    closure: int
    plan: StepPlan
    arrays: Sequence[Argument]


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


# -- bounded staleness --------------------------------------------------------

# Staleness is a deadline. With a bound of s, a closure that pulled at time p must push by
# time p + s, and each push by anyone advances time by one. If the due pushes are sorted by
# deadline, d[0] <= d[1] <= ..., and d[i] >= now + i for all i, all can be in time: earliest
# first. A pull or a push that would break that waits. The closure with the earliest deadline
# never has to, so some closure can always proceed; and a closure whose worker is lost is
# removed. A closure of several stages has a deadline for each, one later than the previous:
# its own pushes do not make it stale.


class Deadlines:
    """The deadlines of closures that have pulled: the rule, without any waiting."""

    def __init__(self, max_staleness: int):
        self.max_staleness = max_staleness
        self.now = 0  # the number of pushes so far
        self._due: dict[int, list[int]] = {}  # by closure: the deadlines of its remaining pushes

    def may_pull(self, num_pushes: int) -> bool:
        """Returns whether a closure of `num_pushes` may pull now."""
        due = itertools.chain(*self._due.values(), self._deadlines_of(num_pushes))
        return self._can_keep(due, self.now)

    def pull(self, closure: int, num_pushes: int) -> None:
        """Records that a closure has pulled."""
        self._due[closure] = self._deadlines_of(num_pushes)

    def may_push(self, closure: int) -> bool:
        """Returns whether all others can still be in time if a closure pushes now."""
        left = {**self._due, closure: self._due[closure][1:]}
        return self._can_keep(itertools.chain(*left.values()), self.now + 1)

    def push(self, closure: int) -> None:
        """Records that a closure has pushed."""
        self.now += 1
        del self._due[closure][0]
        if not self._due[closure]:
            del self._due[closure]

    def forget(self, closure: int) -> None:
        """Drops the deadlines of a closure that will not push any more."""
        self._due.pop(closure, None)

    def _deadlines_of(self, num_pushes: int) -> list[int]:
        return [self.now + self.max_staleness + i for i in range(num_pushes)]

    @staticmethod
    def _can_keep(deadlines: Iterable[int], now: int) -> bool:
        return all(due >= now + i for i, due in enumerate(sorted(deadlines)))


class Gate:
    """Makes closures wait, so that no push exceeds the staleness bound.

    Pushes pass it one after the other across all servers: the order of the gate is the order
    of every server's versions. So the bound holds at each server, whatever their number.

    Args:
      max_staleness: the bound; None: nobody waits.
    """

    def __init__(self, max_staleness: int | None):
        self.is_open = max_staleness is None
        self._deadlines = Deadlines(max_staleness or 0)
        self._is_in_turn = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def admitted(self, closure: int, num_pushes: int) -> Generator[None]:
        """Waits until a closure may pull; after the block, no closure waits for it."""
        if self.is_open or not num_pushes:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: self._deadlines.may_pull(num_pushes))
            self._deadlines.pull(closure, num_pushes)
        try:
            yield
        finally:
            with self._changed:
                self._deadlines.forget(closure)
                self._changed.notify_all()

    @contextlib.contextmanager
    def turn(self, closure: int, stage: Stage) -> Generator[None]:
        """Waits until a closure may push a stage; inside, no other closure does."""
        if self.is_open or not writes(stage):
            yield
            return
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_in_turn and self._deadlines.may_push(closure)
            )
            self._is_in_turn = True
        try:
            yield
        finally:
            with self._changed:
                self._deadlines.push(closure)
                self._is_in_turn = False
                self._changed.notify_all()


# -- attempts -----------------------------------------------------------------

# Everything is passed on as futures: nothing here waits for a program.


class Servers(Protocol):
    """The servers, as a worker sees them."""

    def compile(self, wanted: Wanted, pushes: Iterable[tuple[int, Push]]) -> None:
        """Has servers compile pushes, each with the number of its stage, and what is pulled."""
        ...

    def pull(self, wanted: Wanted) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        """Returns, by server, the version and values of the wanted keys."""
        ...

    def push(self, stage: int, sent: Sequence[Parcel]) -> Iterable[Answer]:
        """Sends the pushes of a stage; returns the answers in the same order."""
        ...


#: By server: keys of variables.
Wanted = Mapping[int, Sequence[str]]
#: A push, its operands, and the version that was pulled from its server, if any.
Parcel = tuple[Push, Sequence[jax.Array], int | None]


class Attempt:
    """One attempt at a closure: the slots of its plan, and what was sent.

    All programs are compiled, also at servers, before anything is pulled.

    Attributes:
      versions: of each server used: after its last push, or as pulled.
      tokens: ready when everything has run.
    """

    def __init__(
        self, task: Task, servers: Servers, home: Topology, compiled: OnceEach[list[Executable]]
    ):
        self._plan, self._servers, self._home = task.plan, servers, home
        self._wanted: dict[int, list[str]] = {server: [] for server in task.plan.owners.values()}
        for _, key in task.plan.pulls:
            self._wanted[task.plan.owners[key]].append(key)
        signature = home.devices, raises_for_values()
        self._executables = compiled.get(task.plan, signature, self._compile)
        self._slots: dict[int, jax.Array] = {}
        self._bring(task.plan.arguments, task.arrays)
        self.versions: dict[int, int] = {}
        self.tokens: list[jax.Array] = []

    @property
    def results(self) -> tuple[jax.Array, ...]:
        """The flat results."""
        return tuple(self._slots[slot] for slot in self._plan.results)

    def run(self) -> Generator[Stage]:
        """Pulls one version of each server, and runs stage after stage.

        Yields each stage that pushes, when it has been computed; pushes it when asked for the next.
        """
        plan, pulled = self._plan, self._servers.pull(self._wanted)
        for server, (version, values) in pulled.items():
            self.versions[server] = version
            self._bring([s for s, key in plan.pulls if plan.owners[key] == server], values)
        for number, stage in enumerate(plan.stages):
            operands = [self._slots[slot] for slot in stage.operands]
            results, token = self._executables[number].run(operands)
            self._slots.update(zip(stage.results, results, strict=True))
            self.tokens.append(token)
            if not stage.pushes:
                continue
            yield stage
            version_of = lambda server: pulled[server][0] if server in pulled else None
            sent = [
                (push, [self._slots[slot] for slot in push.operands], version_of(push.server))
                for push in stage.pushes
            ]
            answers = self._servers.push(number, sent)
            for push, answer in zip(stage.pushes, answers, strict=True):
                self._bring(push.answers, answer.arrays)
                self.versions[push.server] = answer.version
                self.tokens += [] if answer.token is None else [answer.token]

    def _compile(self) -> list[Executable]:
        plan = self._plan
        made = [Executable(s.program, *shardings_of(s, plan, self._home)) for s in plan.stages]
        pushes = [(number, p) for number, stage in enumerate(plan.stages) for p in stage.pushes]
        self._servers.compile(self._wanted, pushes)
        return made

    def _bring(self, slots: Sequence[int], arrays: Sequence[Argument]) -> None:
        """Fills slots with arrays from elsewhere."""
        for slot, array in zip(slots, arrays, strict=True):
            self._slots[slot] = place(array, sharding_of(slot, self._plan, self._home))


# -- workers that are threads -------------------------------------------------

# Pull, compute and push pass futures on, so a worker begins its next closure while this one's
# programs run. Only a push waits until the worker's part of the stage is computed; otherwise the
# next to pull would wait for it too, and workers would compute one after the other. A lone worker
# has no one to keep waiting, and pushes at once.


#: (point, worker, closure): called at the points of a possible failure; may raise one.
Fault = Callable[[str, int, int], None]


class ThreadEngine(Engine):
    """Runs workers as threads of this process, and servers on its devices.

    Args:
      fault: for tests: called as ``fault(point, worker, closure)`` at the points "pull",
        "before_push" and "after_push", where it may raise `WorkerDied`, and "server", just
        before a push is applied, where it may raise `ServerDied`.

    Example:
      >>> engine = dj.servers.ThreadEngine()
      >>> strategy = dj.ParameterServerStrategy(workers=2, engine=engine)
    """

    max_failures = 3

    def __init__(self, *, fault: Fault | None = None):
        self._fault = fault
        self._servers: list[Server] = []
        self._homes: Sequence[Topology] = ()
        self._gate = Gate(None)
        self._compiled = OnceEach[list[Executable]]()
        self._seen: set[int] = set()  # workers that run closures

    @property
    def servers(self) -> Sequence[Server]:
        return self._servers

    def __repr__(self) -> str:
        return "ThreadEngine()"

    def start(
        self,
        workers: Sequence[Topology],
        server_devices: Sequence[jax.Device],
        max_staleness: int | None,
    ) -> None:
        self._homes = tuple(workers)
        self._servers = [Server(i, device) for i, device in enumerate(server_devices)]
        self._gate = Gate(max_staleness)

    def run(self, worker: int, task: Task) -> Ran:
        home = self._homes[worker % len(self._homes)]
        self._seen.add(worker)
        ask = functools.partial(self._ask, worker=worker, closure=task.closure)
        near = _NearServers(self._servers, home, task, ask)
        attempt = Attempt(task, near, home, self._compiled)
        with self._gate.admitted(task.closure, count_writes(task.plan)):
            ask("pull")
            stages = attempt.run()
            stage = next(stages, None)
            while stage is not None:
                if len(self._seen) > 1:
                    jax.block_until_ready(attempt.tokens)
                ask("before_push")
                with self._gate.turn(task.closure, stage):
                    stage = next(stages, None)
                ask("after_push")
        versions = (attempt.versions.get(s.number, s.version) for s in self._servers)
        return Ran(attempt.results, tuple(versions), tuple(attempt.tokens))

    def end_worker(self, worker: int) -> None:
        self._seen.discard(worker)

    def _ask(self, point: str, worker: int, closure: int) -> None:
        """Lets the fault function raise."""
        if self._fault is not None:
            self._fault(point, worker, closure)


class _NearServers:
    """The servers, as a worker in the same process sees them."""

    def __init__(
        self, servers: Sequence[Server], home: Topology, task: Task, ask: Callable[[str], None]
    ):
        self._servers, self._home, self._task, self._ask = servers, home, task, ask

    def compile(self, wanted: Wanted, pushes: Iterable[tuple[int, Push]]) -> None:
        for number, keys in wanted.items():
            self._servers[number].compile_pull(keys, self._home)
        for _, push in pushes:
            self._servers[push.server].compile(push)

    def pull(self, wanted: Wanted) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        return {k: self._servers[k].pull(keys, self._home) for k, keys in wanted.items()}

    def push(self, stage: int, sent: Sequence[Parcel]) -> Iterable[Answer]:
        key = self._task.closure, stage
        before = lambda: self._ask("server")
        return [
            self._servers[push.server].push(key, push, arrays, pulled=pulled, before=before)
            for push, arrays, pulled in sent
        ]
