"""What runs in Ray's processes, workers and servers, and what is sent to them and back.

Of the user's code, only what makes data runs there. Arrays travel as numpy arrays, without a copy;
programs as StableHLO; exceptions as Ray sends them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import export
from jax.sharding import Sharding, SingleDeviceSharding

import distjax
from distjax._src import jax_compat
from distjax._src.context import ProgramModes
from distjax._src.placement.topology import abstract_topology
from distjax._src.placement.transfer import transfer_each
from distjax._src.servers.engine import Attempt, Parcel, Task, Wanted
from distjax._src.servers.per_worker import Elements, RemoteArray
from distjax._src.servers.plan import (
    Executable,
    OnceEach,
    Program,
    Push,
    Stage,
    StepPlan,
    home_of,
    shardings_of,
    struct_of,
)
from distjax._src.servers.server import Answer, PushKey, Server, lost_error
from distjax._src.typing import PyTree
from distjax.errors import UnsupportedError, message, require

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


class ProcessInfo(NamedTuple):
    """A process's description of itself; `versions` must be the same on both sides."""

    pid: int
    versions: dict[str, str]
    platform: str
    num_devices: int


def describe_this_process() -> ProcessInfo:
    """Returns the description of this process."""
    devices = jax.local_devices()
    return ProcessInfo(os.getpid(), own_versions(), jax.default_backend(), len(devices))


def own_versions() -> dict[str, str]:
    """Returns the versions of this process."""
    return {"jax": jax.__version__, "distjax": distjax.__version__}


#: How many datasets a worker keeps open.
_MOST_DATASETS = 16


class WorkerActor:
    """A worker in its own process, which talks to the servers directly."""

    def __init__(self, num_replicas: int, axis_name: str) -> None:
        self._home = home_of(jax.local_devices()[:num_replicas], axis_name)
        self._device = self._home.devices[0]
        self._plans: dict[int, StepPlan] = {}
        self._datasets: dict[int, Elements] = {}  # the one that was drawn from last at the end
        self.set_servers(())
        #: By closure, from `begin` to the last `push`.
        self._attempts: dict[int, tuple[Attempt, Generator[Stage]]] = {}

    def describe_process(self) -> ProcessInfo:
        return describe_this_process()

    def set_servers(self, servers: Sequence[ActorHandle[ServerActor]]) -> None:
        """Stores the servers: new ones have nothing compiled."""
        self._servers, self._compiled = servers, OnceEach[list[Executable]]()

    def add_plan(self, number: int, plan: StepPlan) -> None:
        """Stores a plan."""
        self._plans[number] = plan

    # -- per-worker data ------------------------------------------------------

    def draw(self, dataset: int, pickled: bytes, index: int) -> tuple[PyTree, list[np.ndarray]]:
        """Returns an element with a struct in place of each array, and its arrays.

        Of datasets that were not drawn from for long, only the latest stay open; another one is
        made again by the function, which is `pickled`.
        """
        from ray import cloudpickle

        try:
            found = self._datasets.pop(dataset, None) or Elements(cloudpickle.loads(pickled))
            self._datasets[dataset] = found
            for other in list(self._datasets)[:-_MOST_DATASETS]:
                del self._datasets[other]
            element = jax.tree.map(_on_host, found[index])
        except SystemExit as error:  # Ray takes it as an order to end the process
            raise RuntimeError(f"per-worker data raised {error!r}") from error
        arrays = [x for x in jax.tree.leaves(element) if isinstance(x, np.ndarray)]
        return jax.tree.map(_as_struct, element), arrays

    # -- closures -------------------------------------------------------------

    def run(self, order: Order) -> Done:
        """Runs a whole attempt."""
        done = self.begin(order)
        while done is None:
            done = self.push(order)
        return done

    def begin(self, order: Order) -> Done | None:
        """Pulls, and computes what comes before the first pushes."""
        own = lambda x: np.asarray(x) if isinstance(x, RemoteArray) else x
        with order.modes():
            arrays = from_wire(list(map(own, order.arrays)), self._device)
            task = Task(order.closure, self._plans[order.plan], arrays)
            servers = _RemoteServers(self._servers, order, self._device)
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
        self, servers: Sequence[ActorHandle[ServerActor]], order: Order, device: jax.Device
    ):
        self._servers, self._order, self._device = servers, order, device

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
        key = order.closure, stage
        ready = [to_wire(arrays) for _, arrays, _ in sent]  # waits until all is computed
        calls = {
            push.server: self._servers[push.server].push.remote(
                order.plan, key, arrays, pulled, order.modes
            )
            for (push, _, pulled), arrays in zip(sent, ready, strict=True)
        }
        return [
            Answer(version, tuple(from_wire(answers, self._device)))
            for _, (version, answers) in _get_all(calls)
        ]


def _get_all(calls: Mapping[int, Any]) -> list[tuple[int, Any]]:
    """Returns each server's answer."""
    answers: list[tuple[int, Any]] = []
    for server, call in calls.items():
        try:
            answers.append((server, get(call)))
        except ProcessDied:
            raise lost_error(server) from None
    return answers


class ProcessDied(Exception):
    """A process that was called is gone; the text says why."""


def get(call: ObjectRef[Any], seconds: float | None = None) -> Any:
    """Returns what a process answers to a call, or raises the exception that it raised.

    Raises:
      ProcessDied: it is gone.
      TimeoutError: it has not answered so soon.
    """
    import ray
    from ray import exceptions

    try:
        return ray.get(call, timeout=seconds)
    except exceptions.RayTaskError as error:  # which has the traceback
        raise error.cause from error
    except (
        exceptions.GetTimeoutError,
        exceptions.RaySystemError,  # this and the next: the answer cannot be read here
        exceptions.UnserializableException,
    ):
        raise
    except exceptions.RayError as error:
        lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()]
        ends = dict.fromkeys((*lines[:1], *lines[-1:]))  # what died, and why
        raise ProcessDied(" ... ".join(ends) or type(error).__name__) from error


# -- servers ------------------------------------------------------------------


class ServerActor:
    """A `Server` in its own process: no code of the user's.

    Ray runs one call at a time, so no value changes while it is sent. Only `compile` runs beside
    the others.
    """

    def __init__(self, number: int):
        self._device = jax.local_devices()[0]
        self._server = Server(number, self._device)
        self._pushes: dict[tuple[int, int], Push] = {}  # by plan and stage

    def describe_process(self) -> ProcessInfo:
        return describe_this_process()

    def ask(self, method: str, args: PyTree, modes: ProgramModes | None) -> PyTree:
        """Returns the result of a method of `ParameterServer`."""
        with modes() if modes else contextlib.nullcontext(), jax.enable_x64(True):
            # 64 bits, since values only pass through.
            result = getattr(self._server, method)(*from_wire(args, self._device))
            return to_wire(result)

    def tell(self, told: Iterable[tuple[str, Any]]) -> None:
        """Drops closures that are over, and values of dead variables."""
        for method, argument in told:
            getattr(self._server, method)(argument)

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


# -- arrays -------------------------------------------------------------------

# JAX's own pickle is slower, PRNG keys are not numpy arrays, and numpy pickles dtypes that it
# does not know (bfloat16) through a copy.


class Disguised(NamedTuple):
    """An array of a dtype unknown to numpy, as one of a dtype that numpy knows.

    Attributes:
      data: the same bytes as unsigned integers.
      dtype: the name of the dtype; for a key, the name of its implementation.
      is_key: whether it is a PRNG key.
    """

    data: np.ndarray
    dtype: str
    is_key: bool


#: The wire form of one array.
OnWire = np.ndarray | Disguised


def to_wire(tree: PyTree) -> Any:
    """Returns a tree with its arrays in wire form; waits until they are computed."""
    return jax.tree.map(lambda x: _to_wire(x) if isinstance(x, jax.Array | np.ndarray) else x, tree)


def _to_wire(array: jax.Array | np.ndarray) -> OnWire:
    if isinstance(array, jax.Array) and jax_compat.is_key_dtype(array.dtype):
        data = np.asarray(jax.random.key_data(array))
        return Disguised(data, jax_compat.key_impl(array.dtype), True)
    host = np.asarray(array)
    if host.dtype.kind != "V":
        return host
    return Disguised(host.view(f"u{host.itemsize}"), host.dtype.name, False)


def from_wire(sent: PyTree, device: jax.Device | None = None) -> Any:
    """Returns a tree with its arrays on a device; on a CPU, where they arrived if possible."""
    leaves, treedef = jax.tree.flatten(sent, is_leaf=lambda x: isinstance(x, Disguised))
    arrays = [x for x in leaves if isinstance(x, OnWire)]
    sharding = None if device is None else SingleDeviceSharding(device)
    with jax.enable_x64(True):  # else 64-bit values would be truncated, whoever sent them
        placed: list[jax.Array] = transfer_each(list(map(_as_host, arrays)), sharding)
        found = map(_as_key, arrays, placed)
        return treedef.unflatten([next(found) if isinstance(x, OnWire) else x for x in leaves])


def _as_host(sent: OnWire) -> np.ndarray:
    if not isinstance(sent, Disguised) or sent.is_key:
        return sent.data if isinstance(sent, Disguised) else sent
    return sent.data.view(jax.numpy.dtype(sent.dtype))


def _as_key(sent: OnWire, array: jax.Array) -> jax.Array:
    if not isinstance(sent, Disguised) or not sent.is_key:
        return array
    return jax.random.wrap_key_data(array, impl=sent.dtype)


# -- orders to a worker -------------------------------------------------------


class Order(NamedTuple):
    """An order to a worker to run an attempt.

    Attributes:
      plan: its number.
      closure: the number of the closure.
      arrays: the flat arguments; a `RemoteArray` for one that Ray keeps.
      modes: the JAX modes in effect where the closure was scheduled.
    """

    plan: int
    closure: int
    arrays: Sequence[OnWire | RemoteArray]
    modes: ProgramModes


class Done(NamedTuple):
    """The result of an attempt: results, and versions by server."""

    results: Sequence[OnWire]
    versions: Mapping[int, int]


# -- plans --------------------------------------------------------------------


class StableFunction:
    """A function of flat arrays as StableHLO: sent as bytes, read at its first run."""

    def __init__(self, blob: bytes):
        self._blob = blob
        self._exported: export.Exported | None = None

    def __call__(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        if self._exported is None:
            self._exported = export.deserialize(bytearray(self._blob))
            _require_no_callback(self._exported)
        return tuple(self._exported.call(*arrays))

    def __reduce__(self) -> tuple[type[StableFunction], tuple[bytes]]:
        return StableFunction, (self._blob,)


def _require_no_callback(exported: export.Exported) -> None:
    """Raises if a received program would call Python, whatever its sender has checked."""
    found = re.search(r"custom_call @(\w*callback\w*)", exported.mlir_module())
    require(
        found is None,
        "a program that is shipped needs to be all StableHLO",
        got=f"one that calls {found and found[1]}",
        why="it would call Python by an address of another process",
        fix="schedule steps by dj.Coordinator, which ships none of that kind",
        error=UnsupportedError,
    )


def export_plan(
    plan: StepPlan,
    replicas: tuple[int, str],
    worker_platforms: Iterable[str],
    server_platforms: Iterable[str],
) -> StepPlan:
    """Returns a plan in the form in which it is sent; an UnsupportedError if it calls Python."""
    anywhere = abstract_topology(*replicas)

    def exported(stage: Stage) -> Stage:
        ins, outs = None, None
        if anywhere.num_replicas > 1:  # over any worker's devices
            ins, (*outs, _) = shardings_of(stage, plan, anywhere)
        return dataclasses.replace(
            stage,
            program=_export(plan.name, stage.program, worker_platforms, ins, outs),
            pushes=tuple(
                dataclasses.replace(p, program=_export(plan.name, p.program, server_platforms))
                for p in stage.pushes
            ),
        )

    # The other fields hold objects of the user or the strategy.
    return dataclasses.replace(
        plan, stages=tuple(map(exported, plan.stages)), rebuild=tuple, kept=()
    )


def _export(
    name: str,
    program: Program,
    platforms: Iterable[str],
    ins: Sequence[Sharding] | None = None,
    outs: Sequence[Sharding] | None = None,
) -> Program:
    pairs = zip(program.avals, ins or (None,) * len(program.avals), strict=True)
    shapes = [struct_of(aval, sharding) for aval, sharding in pairs]
    jitted = jax.jit(program.fn, out_shardings=outs and tuple(outs))
    make: Any = export.export(jitted, platforms=sorted(set(platforms)))
    try:
        blob = bytes(make(*shapes).serialize())
    except (NotImplementedError, ValueError) as error:
        raise UnsupportedError(
            message(
                f"{name} needs programs that run in other processes, on RayEngine",
                got=f"one that cannot be shipped: {error}",
                why="workers and servers are sent StableHLO, and nothing of your Python: there is "
                "nothing that jax.debug.print, pure_callback or io_callback could call",
                fix="take the callback out of the step, and return what it needs; or run it on "
                'engine="threads"',
            )
        ) from error
    return Program(program.name, StableFunction(blob), program.avals)
