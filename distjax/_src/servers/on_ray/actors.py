"""What runs in Ray's processes: workers and servers; of the user's code, only what makes data."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import jax_compat
from distjax._src.context.thread_settings import ProgramModes
from distjax._src.placement.topology import mesh_topology, one_device_topology
from distjax._src.servers.engine import Attempt, Parcel, Task, Wanted
from distjax._src.servers.on_ray.processes import ProcessInfo, describe_this_process
from distjax._src.servers.on_ray.wire import (
    Done,
    Failed,
    OnWire,
    Order,
    Place,
    from_wire,
    to_wire,
)
from distjax._src.servers.per_worker import Elements
from distjax._src.servers.plan import Executable, OnceEach, Push, Stage, StepPlan
from distjax._src.servers.server import Answer, PushKey, Server, lost_error
from distjax._src.typing import PyTree

if TYPE_CHECKING:
    from ray.actor import ActorHandle


class WorkerActor:
    """A worker in its own process, which talks to the servers directly."""

    def __init__(self, num_replicas: int, axis_name: str) -> None:
        self._device, *others = jax.local_devices()[:num_replicas]
        self._home = one_device_topology(self._device, 1, axis_name)
        if others:
            self._home = mesh_topology((self._device, *others), axis_name)
        self._plans: dict[int, StepPlan] = {}
        self._datasets: dict[int, Elements] = {}
        self.set_servers(())
        #: By closure, from `begin` to the last `push`.
        self._attempts: dict[int, tuple[Attempt, Generator[Stage]]] = {}
        self._ready = jnp.zeros((), bool)  # the token of a push: an answered one has run

    def describe_process(self) -> ProcessInfo:
        return describe_this_process()

    def set_servers(self, servers: Sequence[ActorHandle[ServerActor]]) -> None:
        """Stores the servers: new ones have nothing compiled."""
        self._servers, self._compiled = servers, OnceEach[list[Executable]]()

    def add_plan(self, number: int, plan: StepPlan, dropped: Iterable[int]) -> None:
        """Stores a plan, and drops those that the coordinator no longer has."""
        self._plans[number] = plan
        for other in dropped:
            self._plans.pop(other, None)

    # -- per-worker data ------------------------------------------------------

    def draw(
        self, dataset: int, pickled: bytes, index: int, dropped: Iterable[int]
    ) -> tuple[PyTree, list[np.ndarray]]:
        """Returns an element with a struct in place of each array, and its arrays.

        Args:
          dataset: the number of the dataset.
          pickled: the function that makes it.
          index: the number of the element.
          dropped: the numbers of datasets that the coordinator no longer has.
        """
        from ray import cloudpickle

        for other in dropped:
            self._datasets.pop(other, None)
        try:
            if dataset not in self._datasets:
                self._datasets[dataset] = Elements(cloudpickle.loads(pickled))
            element = jax.tree.map(_on_host, self._datasets[dataset][index])
        except BaseException as error:  # Ray takes SystemExit as an order to end the process
            return Failed.of(error), []
        arrays = [x for x in jax.tree.leaves(element) if isinstance(x, np.ndarray)]
        return jax.tree.map(_as_struct, element), arrays

    # -- closures -------------------------------------------------------------

    def run(self, order: Order, *elements: Sequence[np.ndarray]) -> Done:
        """Runs a whole attempt; `elements` has the arrays of those that the order names."""
        done = self.begin(order, *elements)
        while done is None:
            done = self.push(order)
        return done

    def begin(self, order: Order, *elements: Sequence[np.ndarray]) -> Done | None:
        """Pulls, and computes what comes before the first pushes."""
        own = lambda x: elements[x.element][x.number].astype(x.dtype, copy=False)
        sent = [own(x) if isinstance(x, Place) else x for x in order.arrays]
        with order.modes():
            arrays = from_wire(sent, self._device)
            task = Task(order.closure, order.attempt, self._plans[order.plan], arrays)
            servers = _RemoteServers(self._servers, order, self._device, self._ready)
            attempt = Attempt(task, servers, self._home, self._compiled)
        self._attempts[order.closure] = attempt, attempt.run()
        return self.push(order)

    def push(self, order: Order) -> Done | None:
        """Pushes what the begun attempt has computed, and computes on until the next pushes."""
        attempt, stages = self._attempts.pop(order.closure)  # an error leaves nothing
        with order.modes():
            if next(stages, None) is not None:
                self._attempts[order.closure] = attempt, stages
                return None
            return Done(to_wire(attempt.results), attempt.versions)


def _on_host(leaf: PyTree) -> Any:
    is_key = isinstance(leaf, jax.Array) and jax_compat.is_key_dtype(leaf.dtype)
    return np.asarray(leaf) if isinstance(leaf, (jax.Array, np.generic)) and not is_key else leaf


def _as_struct(leaf: PyTree) -> Any:
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return to_wire(leaf)


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

    def compile(self, wanted: Wanted, pushes: Iterable[tuple[int, Push]]) -> None:
        """Sends them their programs, and has them compiled; what is pulled is sent as it is."""
        order = self._order
        for stage, push in pushes:
            server = self._servers[push.server]
            compiled = server.compile.remote(order.plan, stage, push, order.modes)
            _get_all({push.server: compiled})

    def pull(self, wanted: Wanted) -> Mapping[int, tuple[int, Sequence[jax.Array]]]:
        calls = {k: self._servers[k].pull.remote(keys) for k, keys in wanted.items()}
        pulled = _get_all(calls)
        return {k: (version, from_wire(values, self._device)) for k, (version, values) in pulled}

    def push(self, stage: int, sent: Sequence[Parcel]) -> Iterable[Answer]:
        order = self._order
        key = order.closure, stage, order.attempt
        ready = [to_wire(arrays) for _, arrays, _ in sent]  # waits until all is computed
        calls = {
            push.server: self._servers[push.server].push.remote(
                order.plan, key, arrays, pulled, order.modes
            )
            for (push, _, pulled), arrays in zip(sent, ready, strict=True)
        }
        return [
            Answer(version, tuple(from_wire(answers, self._device)), self._token)
            for _, (version, answers) in _get_all(calls)
        ]


def _get_all(calls: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Returns each server's answer."""
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    answers: list[tuple[int, Any]] = []
    for server, call in calls.items():
        try:
            answers.append((server, ray.get(call)))
        except RayActorError:
            raise lost_error(server) from None
        except RayTaskError as error:  # as it was raised in the other process
            raise error.cause from None
    return answers


# -- servers ------------------------------------------------------------------


class ServerActor:
    """A `Server` in its own process: no code of the user's.

    Ray runs one call at a time, so no value changes while it is sent. Only `compile` runs beside
    the others.

    Args:
      number: its number in the strategy.
    """

    def __init__(self, number: int):
        self._device = jax.local_devices()[0]
        self._server = Server(number, self._device)
        self._pushes: dict[tuple[int, int], Push] = {}  # by plan and stage

    def describe_process(self) -> ProcessInfo:
        return describe_this_process()

    def plans(self) -> set[int]:
        """Returns the numbers of the plans that it has."""
        return {plan for plan, _ in self._pushes.copy()}

    def ask(self, method: str, args: PyTree, modes: ProgramModes | None) -> PyTree:
        """Returns the result of a method of `ParameterServer`."""
        with modes() if modes else contextlib.nullcontext(), jax.enable_x64(True):
            # 64 bits, since values only pass through.
            result = getattr(self._server, method)(*from_wire(args, self._device))
            return to_wire(result)

    def tell(self, over: Iterable[int], removed: Iterable[str], plans: Collection[int]) -> None:
        """Drops closures that are over, values of dead variables, and plans."""
        for closure in over:
            self._server.mark_done(closure)
        self._server.remove(removed)
        for plan, stage in self._pushes.copy() if plans else ():
            if plan in plans:
                del self._pushes[plan, stage]

    def pull(self, keys: Sequence[str]) -> tuple[int, list[OnWire]]:
        """Returns the version, and the values at that version, for a worker."""
        with jax.enable_x64(True):
            version, values = self._server.pull(keys, None)
            return version, to_wire(values)

    def compile(self, plan: int, stage: int, push: Push, modes: ProgramModes) -> None:
        """Stores a push and compiles it, while others are applied: see `Server.compile`."""
        push = self._pushes.setdefault((plan, stage), push)  # each worker sends it
        with modes():
            self._server.compile(push)

    def push(
        self,
        plan: int,
        key: PushKey,
        arrays: Sequence[OnWire],
        pulled: int | None,
        modes: ProgramModes,
    ) -> tuple[int, list[OnWire]]:
        """Returns version and answers of `Server.push`."""
        operands = from_wire(arrays, self._device)
        with modes():
            answer = self._server.push(key, self._pushes[plan, key[1]], operands, pulled=pulled)
        return answer.version, to_wire(answer.arrays)


# -- their processes ----------------------------------------------------------


def start_actor(kind: type, beside: str, options: Mapping[str, Any], *args: object) -> Any:
    """Returns a new process whose method `beside` runs beside the others, one call at a time."""
    import ray

    ray.method(concurrency_group="beside")(getattr(kind, beside))
    given: Any = {**options, "concurrency_groups": {"beside": 1}}
    remote: Any = ray.remote(**given)
    return remote(kind).remote(*args)
