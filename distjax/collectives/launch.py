"""Starting compiled programs, with a bound on how many are in flight.

Before JAX 0.12 a CPU process with several devices hangs, and aborts after 40 s,
when more than about 30 programs with collectives are enqueued and none is
awaited. There, at most `MAX_IN_FLIGHT` are; then all of them are awaited at once,
which costs less than awaiting the oldest at every start. Elsewhere nothing is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distjax import jax_compat

MAX_IN_FLIGHT = 10

_in_flight: list[jax.Array] = []
_lock = threading.Lock()


@functools.cache
def is_throttled() -> bool:
    """Returns whether the number of programs in flight has to be bounded."""
    return (
        jax_compat.CPU_COLLECTIVES_NEED_THROTTLE
        and jax.default_backend() == "cpu"
        and jax.local_device_count() > 1
    )


def make_ticket() -> Any:
    """Returns an extra output for a program: ready when the program is done.

    None where nothing is throttled. It is never donated.
    """
    return jnp.zeros((), jnp.int8) if is_throttled() else None


def launched(ticket: Any) -> None:
    """Records a started program; waits for all when too many are in flight."""
    if ticket is None or isinstance(ticket, jax_compat.Tracer):
        return
    with _lock:
        _in_flight.append(ticket)
        if len(_in_flight) < MAX_IN_FLIGHT:
            return
        started = list(_in_flight)
        _in_flight.clear()
    for each in started:
        each.block_until_ready()


@functools.lru_cache(maxsize=1024)
def _program(fn: Callable[..., Any], static: tuple[Any, ...]) -> Callable[..., Any]:
    def program(arrays: Any) -> tuple[Any, Any]:
        return fn(arrays, *static), make_ticket()

    return jax.jit(program)


def compiled(fn: Callable[..., Any], arrays: Any, *static: Any) -> Any:
    """Returns ``fn(arrays, *static)``, compiled once per function and static values.

    In a trace the call becomes part of it.

    Args:
      fn: a module-level function of a tree of arrays and hashable values.
      arrays: the tree of arrays.
      *static: hashable values.
    """
    if jax_compat.tracing():
        return fn(arrays, *static)
    out, ticket = _program(fn, static)(arrays)
    launched(ticket)
    return out
