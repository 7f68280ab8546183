"""StepPlan: a step, cut into programs for workers and for servers; and how programs are run.

Each program is jitted once per variant, and compiled before a worker pulls. A worker that pulled
and then compiled for seconds would push gradients, and whole values, of a snapshot that others have
replaced hundreds of times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jec
from jax.sharding import Sharding

from distjax._src import jax_compat
from distjax._src.jax_compat import ShapedArray
from distjax._src.placement.topology import Topology
from distjax._src.placement.transfer import transfer
from distjax._src.servers.per_worker import Argument, RemoteArray
from distjax._src.variables.storage import StoredArray


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A pure function of flat arrays, jitted by its runner.

    Attributes:
      name: its name in error texts.
      fn: (*arrays) -> tuple of arrays.
      avals: shapes and dtypes of the arrays.
    """

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
      argument_names: of the flat arguments, in the user's words.
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
    argument_names: tuple[str, ...] = ()


def writes(stage: Stage) -> bool:
    """Returns whether any push of a stage writes."""
    return any(push.writes for push in stage.pushes)


def count_writes(plan: StepPlan) -> int:
    """Returns the number of stages that write."""
    return sum(map(writes, plan.stages))


# -- running programs ---------------------------------------------------------


#: Where results and the token are placed: all on one device, or each over several.
OutShardings: TypeAlias = Sharding | tuple[Sharding, ...]
#: An argument, or what stands for it in a compilation.
Given: TypeAlias = jax.Array | np.ndarray | jax.ShapeDtypeStruct
#: Of a jitted program: which arguments are donated, and where its results are placed.
_Variant: TypeAlias = tuple[tuple[int, ...], OutShardings | None]
#: Held while a program is enqueued on several devices: two that reached them in different orders
#: would wait for each other forever.
_launching = threading.Lock()


class Programs:
    """Runs programs, and keeps their jitted functions as long as their plans are alive.

    Each program gets one more result, a token, since it may have no result of its own to wait for.
    """

    def __init__(self) -> None:
        self._jitted = weakref.WeakKeyDictionary[Program, dict[_Variant, Any]]()
        self._making = threading.Lock()

    def run(
        self,
        program: Program,
        args: Sequence[jax.Array],
        donated: tuple[int, ...] = (),
        outs: OutShardings | None = None,
    ) -> tuple[tuple[jax.Array, ...], jax.Array]:
        """Returns the results, possibly not ready, and a token that is ready with them.

        A program with Python callbacks has completed on return, and nothing is donated to it: its
        errors are raised here, before anything uses values that it did not compute.

        Args:
          program: the program, to run where `args` are.
          args: its arguments.
          donated: the numbers of the arguments that are donated.
          outs: where its results are placed; None: on the device of `args`.
        """
        run, calls_back = self._find(program, args, donated, outs)
        with _launching if isinstance(outs, tuple) else contextlib.nullcontext():
            *results, token = run(*args)
        if calls_back:
            jax.block_until_ready(token)
        return tuple(results), token

    def trace(
        self,
        program: Program,
        args: Sequence[Given],
        donated: tuple[int, ...] = (),
        outs: OutShardings | None = None,
    ) -> jax.stages.Traced:
        """Returns the traced function that `run` calls for such arguments."""
        jitted, _ = self._find(program, args, donated, outs)
        return jitted.trace(*args)

    def _find(
        self,
        program: Program,
        args: Sequence[Given],
        donated: tuple[int, ...],
        outs: OutShardings | None,
    ) -> Any:
        if raises_for_values():  # only after running, when donated arrays would be gone
            donated = ()
        found = self._jitted.get(program, {}).get((donated, outs))
        if found is not None:
            return found
        with self._making:  # else two workers would trace one program twice
            variants = self._jitted.setdefault(program, {})
            if (donated, outs) not in variants:
                variants[donated, outs] = _make(program, args, donated, outs)
            return variants[donated, outs]


def _make(
    program: Program,
    args: Sequence[Given],
    donated: tuple[int, ...],
    outs: OutShardings | None,
) -> Any:
    fn = program.fn  # the jitted function must not keep its own key alive

    def with_token(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return (*fn(*arrays), jnp.zeros((), jnp.bool_))

    with_token.__name__ = with_token.__qualname__ = program.name
    # Results are committed to a device if arguments are, but unused ones would not count.
    jit = functools.partial(jax.jit, with_token, out_shardings=outs, keep_unused=True)
    jitted = jit()
    if _calls_back(jitted.trace(*args).jaxpr.jaxpr):
        return jitted, True
    if donated:
        jitted = jit(donate_argnums=donated)
    return jitted, False


def compile_traced(traced: jax.stages.Traced) -> list[jax.ShapeDtypeStruct]:
    """Compiles what `Programs.trace` returned; returns the structs of its results.

    This fills the caches of `jax.jit` itself, so that `Programs.run` compiles nothing.
    """
    traced.lower().compile()
    outs: Any = traced.out_info
    return outs[:-1]


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
    """Returns an array committed to `where`, so that a program's results stay there too.

    Numpy arrays are returned as they are: the program moves them to its other arguments.
    """
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


def sharding_of(slot: int, plan: StepPlan, home: Topology) -> Sharding:
    """Returns the sharding with which a worker holds a slot of a plan."""
    return home.per_replica if slot in plan.varying else home.mirrored


def outs_of(stage: Stage, plan: StepPlan, home: Topology) -> tuple[Sharding, ...]:
    """Returns the shardings of the results, and of the token, of a stage's program."""
    return (*(sharding_of(slot, plan, home) for slot in stage.results), home.mirrored)


# -- which plans are compiled -------------------------------------------------


class CompiledPlans:
    """Which plans have their programs compiled, and for which signatures."""

    def __init__(self) -> None:
        self._locks = weakref.WeakKeyDictionary[StepPlan, dict[Hashable, threading.Lock]]()
        self._compiled = weakref.WeakKeyDictionary[StepPlan, set[Hashable]]()
        self._adding = threading.Lock()

    def compile_once(
        self, plan: StepPlan, signature: Hashable, compile_programs: Callable[[], None]
    ) -> None:
        """Calls `compile_programs`, unless it was called before for this plan and signature.

        Workers that share devices wait for the one that compiles.

        Args:
          plan: a plan.
          signature: what its programs depend on besides the plan.
          compile_programs: compiles them.
        """
        if signature in self._compiled.get(plan, ()):
            return
        with self._adding:
            compiled = self._compiled.setdefault(plan, set())
            lock = self._locks.setdefault(plan, {}).setdefault(signature, threading.Lock())
        with lock:
            if signature not in compiled:
                compile_programs()
                compiled.add(signature)
