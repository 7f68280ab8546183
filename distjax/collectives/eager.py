"""Eager operations, compiled once per function and static arguments; a limit on launches in flight.

Before JAX 0.12, a CPU process with several devices hangs, and aborts after 40 s, once more
than about 30 programs with collectives are enqueued without any being awaited. There, at most
`MAX_IN_FLIGHT` programs run at a time; then the older half of them is awaited, which is usually
done by then. Elsewhere nothing is awaited.

The last program of a half stands for all of it: XLA makes a program on several of a process's CPU
devices wait for the end of the one that it launched before (`last_collective_launch_event`), so
such programs end in the order of their launch. Where several processes share an array, programs on
one device keep no order, and each is awaited.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distjax import hooks, jax_compat, user_mesh
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


@functools.cache
def is_one_of_several() -> bool:
    """Returns whether other processes run the same programs, as `jax.distributed` has it."""
    return jax.process_count() > 1


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
        if not launch or awaiting or is_one_of_several():
            record_completion(completion, launch)


def record_completion(completion: jax.Array, launch: int) -> None:
    """Records the completion of a launched program; awaits the older half if this one ends a half.

    Of the launches of a half only the last needs to be recorded, unless other threads are
    waiting, or there are several processes.

    Args:
      completion: is ready when the program is done.
      launch: the result of `count_launch`.
    """
    _newer.append(completion)
    if launch and not awaiting:
        return
    awaiting.append(None)
    try:
        _await_older()
    finally:
        awaiting.pop()
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
        is_told = is_one_of_several() or is_throttled()
        return fn(arrays, *static), make_token() if is_told else None

    return jax.jit(program)


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
      name: the operation in the user's words, equal on all processes; default: that of ``fn``.
    """
    if jax_compat.tracing():
        return fn(arrays, *static)
    compiled = _compile(fn, static)
    begun = [begin(name or fn.__name__, fn, arrays, static) for begin in hooks.on_operation]
    token = None
    try:
        out, token = compiled(arrays)
    finally:
        for end in begun:
            if end is not None:
                end(token)
    throttle(token)
    return out
