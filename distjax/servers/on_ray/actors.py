"""What runs in the processes of Ray: a server, and a worker. Nothing of the user's Python."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import ray
from ray.exceptions import RayActorError, RayTaskError

from distjax.context.thread_settings import ProgramModes
from distjax.servers.applied import Answer
from distjax.servers.attempt import Attempt, Parcel
from distjax.servers.engine import Task
from distjax.servers.on_ray.hello import Hello, say_hello
from distjax.servers.on_ray.wire import OnWire, for_programs, from_wire, to_wire
from distjax.servers.plan import Plan, Program
from distjax.servers.programs import Programs
from distjax.servers.server_contract import ServerSnapshot, Totals
from distjax.servers.store import Server

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class Report(NamedTuple):
    """What a server says of itself: see `ParameterServer`."""

    version: int
    nbytes: int
    num_kept: int
    totals: Totals
    num_plans: int


class ServerActor:
    """A `Server` in a process of its own.

    Ray runs one call at a time, so nobody changes a value while it is sent.

    Args:
      number: which of the strategy's.
      plans: its programs by plan and stage, of all plans that there are.
    """

    def __init__(self, number: int, plans: Mapping[int, Mapping[int, Program]]):
        self._device = jax.local_devices()[0]
        self._server = Server(number, self._device)
        self._plans = dict(plans)

    def hello(self) -> Hello:
        return say_hello()

    def report(self) -> Report:
        server = self._server
        return Report(
            server.version, server.nbytes, server.num_kept, server.read_totals(), len(self._plans)
        )

    def learn(self, plan: int, programs: Mapping[int, Program]) -> None:
        """Takes the programs of a plan, by stage."""
        self._plans[plan] = programs

    def forget(self, plans: Iterable[int]) -> None:
        """Drops plans of which the coordinator has no more."""
        for plan in plans:
            self._plans.pop(plan, None)

    def create(self, key: str, value: OnWire) -> None:
        with jax.enable_x64(True):  # as everywhere where values only pass through
            self._server.create(key, *from_wire([value], self._device))

    def remove(self, keys: Iterable[str]) -> None:
        self._server.remove(keys)

    def write(self, key: str, value: OnWire) -> int:
        with jax.enable_x64(True):
            return self._server.write(key, *from_wire([value], self._device))

    def read(self, keys: Sequence[str], *, is_pull: bool) -> tuple[int, list[OnWire]]:
        """Returns the version, and the values that are there then."""
        with jax.enable_x64(True):
            version, values = self._server.view(keys, is_pull=is_pull)
            return version, to_wire(values)

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

    def mark_done(self, closures: Iterable[int]) -> None:
        """Forgets closures that are over."""
        for closure in closures:
            self._server.mark_done(closure)

    def snapshot(self) -> tuple[int, dict[str, OnWire]]:
        with jax.enable_x64(True):
            snapshot = self._server.snapshot()
            sent = to_wire(snapshot.values.values())
        return snapshot.version, dict(zip(snapshot.values, sent, strict=True))

    def restore(self, version: int, values: Mapping[str, OnWire], num_closures: int) -> None:
        arrays = from_wire(list(values.values()), self._device)
        with jax.enable_x64(True):
            snapshot = ServerSnapshot(version, dict(zip(values, arrays, strict=True)))
            self._server.restore(snapshot, num_closures)


@dataclasses.dataclass(frozen=True)
class Order:
    """What a worker is told to run.

    Attributes:
      plan: its number.
      epoch: of the servers: a new one begins when a server is made anew.
      closure: the number of the closure.
      attempt: 1, 2, ...
      arrays: the flat arguments.
      modes: of JAX, where it was scheduled.
    """

    plan: int
    epoch: int
    closure: int
    attempt: int
    arrays: Sequence[OnWire]
    modes: ProgramModes


@dataclasses.dataclass(frozen=True)
class Done:
    """What an attempt came to: results, and versions by server."""

    results: Sequence[OnWire]
    versions: Mapping[int, int]


@dataclasses.dataclass(frozen=True)
class Failed:
    """What an attempt raised."""

    error: BaseException


@dataclasses.dataclass(frozen=True)
class ServerGone:
    """A server did not answer any more."""

    server: int


class Unknown:
    """The worker does not know the plan, or the servers, of an order: see `WorkerActor.learn`."""


class Stopped(Exception):
    """The closure is not wanted any more."""


#: What a call of a worker returns; None: go on.
Outcome = Done | Failed | ServerGone | Unknown | None


class WorkerActor:
    """A worker in a process of its own, which talks to the servers directly."""

    def __init__(self) -> None:
        self._device = jax.local_devices()[0]
        self._programs = Programs()
        self._plans: dict[int, Plan] = {}
        self._epoch = -1
        self._servers: Sequence[ActorHandle[ServerActor]] = ()
        self._attempt: Attempt | None = None  # between the calls of one that takes turns
        self._stopped: set[int] = set()
        self._ready = jax.numpy.zeros((), bool)  # what has answered, has run

    def hello(self) -> Hello:
        return say_hello()

    def learn(
        self, plan: int, programs: Plan, epoch: int, servers: Sequence[ActorHandle[ServerActor]]
    ) -> None:
        """Takes a plan, and the servers that there are now."""
        self._plans[plan] = programs
        self._epoch, self._servers = epoch, servers

    def forget(self, plans: Iterable[int]) -> None:
        """Drops plans of which the coordinator has no more."""
        for plan in plans:
            self._plans.pop(plan, None)

    @ray.method(concurrency_group="control")
    def stop(self, closure: int) -> None:
        """Has a closure end before its next push."""
        self._stopped.add(closure)

    def run(self, order: Order) -> Outcome:
        """Does all of an attempt."""
        return self._guarded(order, self._run)

    def begin(self, order: Order) -> Outcome:
        """Pulls, and computes the first stage."""
        return self._guarded(order, self._begin)

    def push(self, order: Order, stage: int) -> Outcome:
        """Pushes a stage of the attempt that was begun, and computes the next one."""
        return self._guarded(order, lambda order: self._push(order, stage))

    def _guarded(self, order: Order, act: Callable[[Order], Outcome]) -> Outcome:
        if order.plan not in self._plans or order.epoch != self._epoch:
            return Unknown()
        try:
            with order.modes():
                return act(order)
        except _Gone as gone:
            return ServerGone(gone.server)
        except Exception as error:
            return Failed(_portable(error))

    def _run(self, order: Order) -> Outcome:
        outcome = self._begin(order)
        for number in range(len(self._plans[order.plan].stages)):
            outcome = self._push(order, number)
        return outcome

    def _begin(self, order: Order) -> Outcome:
        plan = self._plans[order.plan]
        arrays = for_programs(order.arrays, self._device)
        task = Task(order.closure, order.attempt, plan, arrays, self._require_wanted(order))
        far = _FarServers(self._servers, order, self._device, self._ready)
        self._attempt = Attempt(task, far, self._programs, self._device)
        self._attempt.pull()
        return self._compute(order, 0)

    def _push(self, order: Order, stage: int) -> Outcome:
        assert self._attempt is not None, "it was begun"
        if self._plans[order.plan].stages[stage].pushes:
            self._attempt.push(stage)
        return self._compute(order, stage + 1)

    def _compute(self, order: Order, stage: int) -> Outcome:
        attempt = self._attempt
        assert attempt is not None, "it was begun"
        if stage < len(self._plans[order.plan].stages):
            attempt.compute(stage)
            return None
        self._attempt = None
        self._stopped.discard(order.closure)
        return Done(to_wire(attempt.results), attempt.versions)

    def _require_wanted(self, order: Order) -> Callable[[], None]:
        def require_wanted() -> None:
            if order.closure in self._stopped:
                raise Stopped(order.closure)

        return require_wanted


class _Gone(Exception):
    """A server does not answer."""

    def __init__(self, server: int):
        super().__init__(server)
        self.server = server


class _FarServers:
    """The servers, as a worker in a process of its own sees them."""

    def __init__(
        self,
        servers: Sequence[ActorHandle[ServerActor]],
        order: Order,
        device: jax.Device,
        token: jax.Array,
    ):
        self._servers, self._order, self._device = servers, order, device
        self._token = token

    def pull(
        self, wanted: Mapping[int, Sequence[str]]
    ) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        calls = {k: self._servers[k].read.remote(keys, is_pull=True) for k, keys in wanted.items()}
        pulled = _get_all(calls)
        return {k: (version, for_programs(sent, self._device)) for k, (version, sent) in pulled}

    def push(self, task: Task, stage: int, parcels: Sequence[Parcel]) -> Iterable[Answer]:
        order = self._order
        sent = [to_wire(parcel.arrays) for parcel in parcels]  # when all is computed:
        task.require_wanted()
        calls = {
            p.push.server: self._servers[p.push.server].push.remote(
                order.plan,
                stage,
                order.closure,
                order.attempt,
                (p.push.takes, p.push.writes),
                arrays,
                p.pulled,
                order.modes,
            )
            for p, arrays in zip(parcels, sent, strict=True)
        }
        return [
            Answer(version, tuple(for_programs(answers, self._device)), self._token)
            for _, (version, answers) in _get_all(calls)
        ]


def _get_all(calls: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Returns what each server answered."""
    try:
        with _unwrapped():
            return list(zip(calls, ray.get(list(calls.values())), strict=True))
    except RayActorError:
        raise _Gone(_first_gone(calls)) from None


def _first_gone(calls: Mapping[int, Any]) -> int:
    for server, call in calls.items():
        try:
            ray.get(call)
        except RayActorError:
            return server
        except Exception:  # another server's own: the one that is gone comes first
            continue
    return next(iter(calls))


@contextlib.contextmanager
def _unwrapped() -> Generator[None]:
    """Raises what a call raised in another process as it was raised there."""
    try:
        yield
    except RayTaskError as error:
        raise error.cause from None


def _portable(error: BaseException) -> BaseException:
    """Returns an error that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
