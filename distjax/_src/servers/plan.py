"""StepPlan: a step, cut into programs for workers and for servers; and how programs are run.

Each program is compiled once for each place, before a worker pulls. A worker that pulled and then
compiled for seconds would push gradients, and whole values, of a snapshot that others have replaced
hundreds of times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jec
from jax.sharding import Sharding
from jax.stages import Lowered

from distjax._src import jax_compat
from distjax._src.jax_compat import ShapedArray
from distjax._src.placement import Topology, transfer
from distjax._src.placement.topology import mesh_topology, one_device_topology
from distjax._src.servers.per_worker import Argument, RemoteArray
from distjax._src.variables.storage import StoredArray

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A pure function of flat arrays, (*arrays) -> tuple of arrays, compiled by its runner."""

    name: str
    fn: Callable[..., tuple[jax.Array, ...]]
    avals: tuple[ShapedArray, ...]


@dataclasses.dataclass(frozen=True)
class Push:
    """What one stage sends to one server, and what it gets back.

    Attributes:
      server: its number.
      operands: slots of the worker that are sent there; names of the trace until it is assembled.
      takes: keys of variables at this server that the program reads.
      writes: those that it gives new values; a subset of `takes`.
      answers: slots of the worker that its answer fills.
      program: (*takes, *operands) -> (*new values of writes, *answers).
    """

    server: int
    operands: tuple[Any, ...]
    takes: tuple[str, ...]
    writes: tuple[str, ...]
    answers: tuple[Any, ...]
    program: Program


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the step on the worker, and the pushes that follow it.

    Attributes:
      operands: slots that the program reads.
      results: slots that it fills.
      program: (*operands) -> (*results).
      pushes: independent of each other, so sent in parallel.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    program: Program
    pushes: tuple[Push, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """A cut step: programs that read and fill numbered slots on the worker.

    Attributes:
      name: the step's name.
      arguments: slots of the flat arguments.
      pulls: (slot, key of a variable) pairs: the snapshot that a worker starts from.
      stages: in order.
      results: slots of the flat results.
      rebuild: flat results -> the result of the user's function.
      owners: key of every variable used -> the number of its server.
      kept: storage of variables, which keeps their values on the servers while the plan lives.
      varying: slots with a row for each replica of a worker; the others hold one value for all.
    """

    name: str
    arguments: tuple[int, ...]
    pulls: tuple[tuple[int, str], ...]
    stages: tuple[Stage, ...]
    results: tuple[int, ...]
    rebuild: Callable[[Sequence[jax.Array]], Any]
    owners: Mapping[str, int]
    kept: tuple[StoredArray, ...] = ()
    varying: frozenset[int] = frozenset()


def writes(stage: Stage) -> bool:
    """Returns whether any push of a stage writes."""
    return any(push.writes for push in stage.pushes)


def count_writes(plan: StepPlan) -> int:
    """Returns the number of stages that write."""
    return sum(map(writes, plan.stages))


# -- running programs ---------------------------------------------------------


#: Held while a program is enqueued on several devices: two that reached them in different orders
#: would wait for each other forever.
_launching = threading.Lock()


class Executable:
    """A program, compiled for where it runs: `ins` and `outs` are the places of its arrays.

    It gives one more result, a token, since it may have no result of its own to wait for. A program
    with Python callbacks has completed on return, and nothing is donated to it: its errors are
    raised before anything uses values that it did not compute.
    """

    def __init__(
        self,
        program: Program,
        ins: Sequence[Sharding],
        outs: Sequence[Sharding],
        donated: tuple[int, ...] = (),
    ):
        structs = _structs(program, ins)
        run = _jit(program, outs)
        self._calls_back = _calls_back(run.trace(*structs).jaxpr.jaxpr)
        if donated and not self._calls_back:
            run = _jit(program, outs, donated)
        # For NaNs, only a jitted function raises an error that is public.
        self._run = run if raises_for_values() else run.lower(*structs).compile()
        self._launching = _launching if len(outs[-1].device_set) > 1 else contextlib.nullcontext()

    def run(self, args: Sequence[jax.Array]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Returns the results, possibly not ready, and a token that is ready with them."""
        with self._launching:
            *results, token = self._run(*args)
        if self._calls_back:
            jax.block_until_ready(token)
        return tuple(results), token


def lower(program: Program, ins: Sequence[Sharding], outs: Sequence[Sharding]) -> Lowered:
    """Returns the program that an `Executable` runs, lowered."""
    return _jit(program, outs).lower(*_structs(program, ins))


def _jit(program: Program, outs: Sequence[Sharding], donated: tuple[int, ...] = ()) -> Any:
    fn = program.fn  # what is kept for a program must not keep that alive

    def with_token(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (*fn(*arrays), jnp.zeros((), jnp.bool_))

    with_token.__name__ = with_token.__qualname__ = program.name
    return jax.jit(with_token, out_shardings=tuple(outs), donate_argnums=donated)


def _structs(program: Program, ins: Sequence[Sharding]) -> list[jax.ShapeDtypeStruct]:
    return [struct_of(aval, where) for aval, where in zip(program.avals, ins, strict=True)]


class OnceEach(Generic[T]):
    """What is made once for an object and a key, as long as the object lives.

    Threads that need the same wait for the one that makes it.
    """

    def __init__(self) -> None:
        self._found = weakref.WeakKeyDictionary[Any, dict[Hashable, _Once[T]]]()
        self._adding = threading.Lock()

    def get(self, owner: object, key: Hashable, make: Callable[[], T]) -> T:
        """Returns what `make` returned for them; `make` may not keep the owner alive."""
        once = self._found.get(owner, {}).get(key)
        if once is None:
            with self._adding:
                once = self._found.setdefault(owner, {}).setdefault(key, _Once())
        if not once.made:
            with once.making:
                if not once.made:
                    once.made.append(make())
        return once.made[0]


class _Once(Generic[T]):
    def __init__(self) -> None:
        self.making = threading.Lock()
        self.made: list[T] = []


def raises_for_values() -> bool:
    """Returns whether JAX raises an error if a result of a program is NaN or infinite."""
    config: Any = jax.config  # these two are thread-local; pyright does not see them
    return config.jax_debug_nans or config.jax_debug_infs


def _calls_back(jaxpr: jec.Jaxpr) -> bool:
    return any(
        "callback" in (name := eqn.primitive.name)
        or name == "debug_print"
        or any(map(_calls_back, jax_compat.sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


# -- the arrays of a plan on a worker's devices -------------------------------


def place(array: Argument, where: Sharding) -> Any:
    """Returns an array committed to `where`; a numpy array as it is: the program moves it."""
    if isinstance(array, RemoteArray):
        return np.asarray(array)
    if isinstance(array, np.ndarray) or (array.committed and array.sharding == where):
        return array
    return transfer(array, where)


def as_view(value: jax.Array) -> jax.Array | np.ndarray:
    """Returns a value's own memory, if numpy can view it; else a copy.

    `np.asarray` would be cached in the value, which could then never be donated again.
    """
    is_plain = not jax_compat.is_key_dtype(value.dtype) and value.dtype.kind in "fiuc"
    (device,) = value.devices()
    if not is_plain or device.platform != "cpu":
        return jnp.array(value, copy=True)
    memory: Any = value  # its type is unknown to numpy
    return np.from_dlpack(memory)


def struct_of(aval: ShapedArray, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    """Returns what stands for an array in a compilation."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def home_of(devices: Sequence[jax.Device], axis_name: str) -> Topology:
    """Returns where a worker with these devices runs its replicas, one on each."""
    if len(devices) == 1:
        return one_device_topology(devices[0], 1, axis_name)
    return mesh_topology(devices, axis_name)


def sharding_of(slot: int, plan: StepPlan, home: Topology) -> Sharding:
    """Returns the sharding with which a worker holds a slot of a plan."""
    return home.per_replica if slot in plan.varying else home.mirrored


def shardings_of(
    stage: Stage, plan: StepPlan, home: Topology
) -> tuple[list[Sharding], list[Sharding]]:
    """Returns the shardings of a program's operands, and of its results and token."""
    place_of = lambda slot: sharding_of(slot, plan, home)
    return [*map(place_of, stage.operands)], [*map(place_of, stage.results), home.mirrored]
