"""What runs in a worker's Ray process; of the user's code, only what makes its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from distjax.jax_compat import ShapedArray
from distjax.placement.topology import mesh_topology, one_device_topology
from distjax.servers.attempt import Attempt, Parcel
from distjax.servers.elements import Place
from distjax.servers.engine import Task
from distjax.servers.on_ray.data import DrawnElements, UnknownDataset
from distjax.servers.on_ray.processes import (
    ProcessInfo,
    describe_this_process,
)
from distjax.servers.on_ray.wire import (
    Done,
    Failed,
    OnWire,
    Order,
    Outcome,
    ServerGone,
    Stopped,
    Unknown,
    arrives_as,
    for_programs,
    to_wire,
)
from distjax.servers.plan import Push, StepPlan
from distjax.servers.programs import CompiledPlans, Given, Programs
from distjax.servers.server import Answer
from distjax.typing import PyTree

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from distjax.servers.on_ray.server import ServerActor

_T = TypeVar("_T")


class WorkerActor:
    """A worker in its own process, which talks to the servers directly.

    Args:
      num_replicas: how many replicas it has, each on its own device.
      axis_name: the name of their axis.
    """

    def __init__(self, num_replicas: int, axis_name: str) -> None:
        self._device, *others = jax.local_devices()[:num_replicas]
        self._home = one_device_topology(self._device, 1, axis_name)
        if others:
            self._home = mesh_topology((self._device, *others), axis_name)
        self._programs = Programs()
        self._compiled = CompiledPlans()
        self._plans: dict[int, StepPlan] = {}
        self._elements = DrawnElements()
        self._epoch = -1
        self._servers: Sequence[ActorHandle[ServerActor]] = ()
        self._attempts: dict[int, Attempt] = {}  # by closure, from `begin` to the last `push`
        self._stopped: set[int] = set()
        self._ready = jax.numpy.zeros((), bool)  # the token of a push: an answered one has run

    def describe_process(self) -> ProcessInfo:
        return describe_this_process()

    def add_plan(
        self, plan: int, programs: StepPlan, epoch: int, servers: Sequence[ActorHandle[ServerActor]]
    ) -> None:
        """Stores a plan, and the current servers."""
        self._plans[plan] = programs
        self._epoch, self._servers = epoch, servers

    def drop_plans(self, plans: Iterable[int]) -> None:
        """Drops plans that the coordinator no longer has."""
        for plan in plans:
            self._plans.pop(plan, None)

    def add_datasets(self, datasets: dict[int, bytes]) -> Unknown | Failed | None:
        """Adds per-worker data: see `DrawnElements.add`."""
        return _outcome_of(lambda: self._elements.add(datasets))

    def drop_datasets(self, datasets: Iterable[int]) -> None:
        """Drops datasets that the coordinator no longer has."""
        self._elements.drop(datasets)

    def draw(self, dataset: int, index: int) -> PyTree:
        """Returns an element of per-worker data, with a struct in place of each array."""
        return _outcome_of(lambda: self._elements.describe(dataset, index))

    def fetch(self, place: Place) -> np.ndarray | Unknown | Failed:
        """Returns an array of an element."""
        return _outcome_of(lambda: self._elements.array(place))

    def stop(self, closure: int) -> None:
        """Makes a closure end before its next push."""
        self._stopped.add(closure)

    def run(self, order: Order) -> Outcome:
        """Runs a whole attempt."""
        return self._guarded(order, self._run)

    def begin(self, order: Order) -> Outcome:
        """Pulls, and computes the first stage."""
        return self._guarded(order, self._begin)

    def push(self, order: Order, stage: int) -> Outcome:
        """Pushes a stage of the begun attempt, and computes the next one."""
        return self._guarded(order, lambda order: self._push(order, stage))

    def _guarded(self, order: Order, act: Callable[[Order], Outcome]) -> Outcome:
        is_known = order.plan in self._plans and order.epoch == self._epoch
        if not is_known or not self._elements.knows(order.arrays):
            return Unknown()
        try:
            with order.modes():
                return act(order)
        except BaseException as error:  # see `_outcome_of`
            self._end_attempt(order)
            if isinstance(error, _Gone):
                return ServerGone(error.server)
            return Failed.of(error)

    def _run(self, order: Order) -> Outcome:
        outcome = self._begin(order)
        for number in range(len(self._plans[order.plan].stages)):
            outcome = self._push(order, number)
        return outcome

    def _begin(self, order: Order) -> Outcome:
        plan = self._plans[order.plan]
        arrays = for_programs([self._own(x) for x in order.arrays], self._device)
        task = Task(order.closure, order.attempt, plan, arrays, self._require_wanted(order))
        servers = _RemoteServers(self._servers, order, self._device, self._ready)
        attempt = Attempt(task, servers, self._programs, self._home)
        attempt.compile(self._compiled)
        attempt.pull()
        self._attempts[order.closure] = attempt
        return self._compute(order, 0)

    def _own(self, array: OnWire | Place) -> OnWire:
        return self._elements.array(array) if isinstance(array, Place) else array

    def _push(self, order: Order, stage: int) -> Outcome:
        if self._plans[order.plan].stages[stage].pushes:
            self._attempts[order.closure].push(stage)
        return self._compute(order, stage + 1)

    def _compute(self, order: Order, stage: int) -> Outcome:
        attempt = self._attempts[order.closure]
        if stage < len(self._plans[order.plan].stages):
            attempt.compute(stage)
            return None
        self._end_attempt(order)
        return Done(to_wire(attempt.results), attempt.versions)

    def _end_attempt(self, order: Order) -> None:
        self._attempts.pop(order.closure, None)
        self._stopped.discard(order.closure)

    def _require_wanted(self, order: Order) -> Callable[[], None]:
        def require_wanted() -> None:
            if order.closure in self._stopped:
                raise Stopped(order.closure)

        return require_wanted


def _outcome_of(call: Callable[[], _T]) -> _T | Unknown | Failed:
    """Returns the result of the user's code, or what it raises."""
    try:
        return call()
    except UnknownDataset:
        return Unknown()
    except BaseException as error:  # Ray takes SystemExit as an order to end the process
        return Failed.of(error)


class _Gone(Exception):
    """A server does not answer."""

    def __init__(self, server: int):
        super().__init__(server)
        self.server = server


class _RemoteServers:
    """The servers, as a worker in its own process sees them."""

    def __init__(
        self,
        servers: Sequence[ActorHandle[ServerActor]],
        order: Order,
        device: jax.Device,
        token: jax.Array,
    ):
        self._servers, self._order, self._device = servers, order, device
        self._token = token

    def arrives_as(self, aval: ShapedArray, sharding: Sharding) -> jax.ShapeDtypeStruct:
        return arrives_as(aval, sharding)

    def compile_pull(self, wanted: Mapping[int, Sequence[str]]) -> None:
        """Does nothing: they send their values."""

    def compile(self, task: Task, stage: int, push: Push, operands: Sequence[Given]) -> None:
        order, server = self._order, self._servers[push.server]
        names = push.takes, push.writes
        _get_all({push.server: server.compile.remote(order.plan, stage, names, order.modes)})

    def pull(
        self, wanted: Mapping[int, Sequence[str]]
    ) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        calls = {k: self._servers[k].pull.remote(keys) for k, keys in wanted.items()}
        pulled = _get_all(calls)
        return {k: (version, for_programs(sent, self._device)) for k, (version, sent) in pulled}

    def push(self, task: Task, stage: int, parcels: Sequence[Parcel]) -> Iterable[Answer]:
        order = self._order
        sent = [to_wire(parcel.arrays) for parcel in parcels]  # waits until all is computed
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
    """Returns each server's answer."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return list(zip(calls, ray.get(list(calls.values())), strict=True))
    except RayActorError:
        raise _Gone(_first_gone(calls)) from None
    except RayTaskError as error:  # as it was raised in the other process
        raise error.cause from None


def _first_gone(calls: Mapping[int, Any]) -> int:
    import ray
    from ray.exceptions import RayActorError

    for server, call in calls.items():
        try:
            ray.get(call)
        except RayActorError:
            return server
        except Exception:  # another server's own error: a lost server takes precedence
            continue
    return next(iter(calls))


def make_worker(
    options: Mapping[str, Any], num_replicas: int, axis_name: str
) -> ActorHandle[WorkerActor]:
    """Returns a new process of a worker."""
    import ray

    groups = {"data": ("add_datasets", "drop_datasets", "draw", "fetch"), "control": ("stop",)}
    for group, methods in groups.items():
        for method in methods:
            ray.method(concurrency_group=group)(getattr(WorkerActor, method))
    given: Any = {**options, "concurrency_groups": dict.fromkeys(groups, 1)}
    remote: Any = ray.remote(**given)
    return remote(WorkerActor).remote(num_replicas, axis_name)
