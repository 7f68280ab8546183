"""Eager operations, compiled once per function and static arguments; a limit on launches in flight.

Before JAX 0.12, a CPU process with several devices hangs, and aborts after 40 s, once more
than about 30 programs with collectives are enqueued without any being awaited. There, at most
`MAX_IN_FLIGHT` programs run at a time; then the older half of them is awaited, which is usually
done by then. Elsewhere nothing is awaited.

The last program of a half stands for all of it: XLA makes a program on several of a process's CPU
devices wait for the end of the one that it launched before (`last_collective_launch_event`), so
such programs end in the order of their launch. In a job of several processes, programs on one
device keep no order, and each is awaited.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distjax import jax_compat, user_mesh
from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact, describe_structure
from distjax.cluster.job import job
from distjax.cluster.ledger import Launch, ledger
from distjax.typing import PyTree

# -- programs in flight ---------------------------------------------------------


MAX_IN_FLIGHT = 16
_HALF = MAX_IN_FLIGHT // 2

# Counted in C, since each call of a program does: 0 for a launch that ends a half.
count_launch = itertools.cycle((*range(1, _HALF), 0)).__next__
_older: list[jax.Array] = []  # ends of the half before
_newer: list[jax.Array] = []
# Not empty while a half is awaited: threads that launch wait for it, too. There is no lock: an
# exception in a signal handler could leave it locked.
awaiting: list[None] = []


@functools.cache
def is_throttled() -> bool:
    """Returns whether the number of programs in flight must be limited."""
    return (
        jax_compat.CPU_COLLECTIVES_NEED_THROTTLE
        and jax.default_backend() == "cpu"
        and jax.local_device_count() > 1
    )


def make_token() -> jax.Array:
    """Returns an extra program output: ready when the program is done, never donated.

    It costs ten microseconds on eight devices: a result that shows the end is better.
    """
    return jnp.zeros((), jnp.int8)


def throttle(completion: jax.Array | None) -> None:
    """Counts a launched program; waits for the older half when too many are in flight.

    Args:
      completion: is ready when the program is done; None: the program is not throttled.
    """
    if completion is not None and not isinstance(completion, jax_compat.Tracer) and is_throttled():
        launch = count_launch()
        if not launch or awaiting or job() is not None:
            record_completion(completion, launch)


def record_completion(completion: jax.Array, launch: int) -> None:
    """Records the completion of a launched program; awaits the older half if this one ends a half.

    Of the launches of a half only the last needs to be recorded, unless other threads are
    waiting, or the process is in a job.

    Args:
      completion: is ready when the program is done.
      launch: the result of `count_launch`.
    """
    _newer.append(completion)
    if launch and not awaiting:
        return
    try:
        awaiting.append(None)
        _await_older()
    finally:
        awaiting.clear()  # with what an exception in a signal handler left here once
    if launch == 0:
        _older[:] = ends = _newer[:]
        del _newer[: len(ends)]  # not those that other threads have added since


def _await_older() -> None:
    """Waits until the older half is done; failures are reported to whoever reads the outputs."""
    ends = older = _older[:]
    for end in older:
        if end.is_deleted():  # donated since, so it tells nothing: then what came later does
            ends = older + _newer
            break
    for end in ends:
        try:
            end.block_until_ready()
        except RuntimeError:
            pass


# -- eager operations -----------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _compile(fn: Callable[..., Any], static: tuple[Any, ...]) -> Callable[..., Any]:
    def program(arrays: PyTree) -> tuple[Any, Any]:
        return fn(arrays, *static), make_token() if job() is not None or is_throttled() else None

    return jax.jit(program)


def _spans_processes(arrays: PyTree) -> bool:
    leaves = jax.tree.leaves(arrays)
    return not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves)


def _agree(name: str, fn: Callable[..., Any], arrays: PyTree, static: tuple[object, ...]) -> int:
    """Has the processes compare an operation that spans them, the first time each kind is run.

    This catches, say, a read or reduction under ``if jax.process_index() == 0``, which would
    otherwise pair up with a different collective of the other processes. Returns a checksum of
    what they compared.
    """
    leaves, treedef = jax.tree.flatten(arrays)
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    shown = ", ".join(map(str, static))  # topologies, modes, axes: none prints a memory address
    what = f"{fn.__name__}({shown}) of {shapes} in {describe_structure(treedef)}"
    facts = [ComparedFact(name, what)]
    agree(name, facts, known_by=[ComparedFact("an operation over the replicas", what)])
    return zlib.crc32(what.encode())


@user_mesh.ignores_user_mesh
def call_compiled(
    fn: Callable[..., Any], arrays: PyTree, *static: object, name: str | None = None
) -> Any:
    """Returns ``fn(arrays, *static)``, compiled once per function and static args.

    Inside a trace, the call is inlined into it.

    Args:
      fn: a module-level function of a pytree of arrays and hashable values.
      arrays: the pytree of arrays.
      *static: hashable values.
      name: the operation in the user's words, for errors and the ledger, equal on all processes;
        default: that of ``fn``.
    """
    if jax_compat.tracing():
        return fn(arrays, *static)
    compiled = _compile(fn, static)
    if job() is not None and _spans_processes(arrays):
        name = name or fn.__name__
        launch = ledger.begin_launch(Launch(name, _agree(name, fn, arrays, static)))
        try:
            out, token = compiled(arrays)
        except BaseException:
            ledger.abandon_launch(launch)
            raise
        ledger.end_launch(launch, token)
    else:
        out, token = compiled(arrays)
    throttle(token)
    return out
