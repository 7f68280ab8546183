"""Starting compiled programs, with a bound on how many are in flight.

Before JAX 0.12 a CPU process with several devices hangs, and aborts after 40 s,
when more than about 30 programs with collectives are enqueued and none is
awaited. There, at most `MAX_IN_FLIGHT` are; then all of them are awaited at once,
which costs less than awaiting the oldest at every start. Elsewhere nothing is.
"""

from __future__ import annotations

import contextlib
import functools
import threading

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


def make_token(is_needed: bool = False) -> jax.Array | None:
    """Returns an extra output for a program: ready when the program is done, never donated.

    None where nothing is throttled, and nobody else needs it: it costs two microseconds.
    """
    return jnp.zeros((), jnp.int8) if is_needed or is_throttled() else None


def throttle(token: jax.Array | None) -> None:
    """Records a started program; waits for all when too many are in flight."""
    if token is None or isinstance(token, jax_compat.Tracer) or not is_throttled():
        return
    with _lock:
        _in_flight.append(token)
        if len(_in_flight) < MAX_IN_FLIGHT:
            return
        started = tuple(_in_flight)
    for each in reversed(started):  # once the newest is done, the others cost next to nothing
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # what has failed tells its reader
            each.block_until_ready()
    with _lock:  # not before: other threads would start as many again meanwhile
        _in_flight[:] = [each for each in _in_flight if not any(each is s for s in started)]
