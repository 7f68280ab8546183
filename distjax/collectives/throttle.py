"""Launching compiled programs, with a limit on how many are in flight.

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

import contextlib
import functools
import itertools
import threading

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.cluster.job import job

MAX_IN_FLIGHT = 16
_HALF = MAX_IN_FLIGHT // 2

_launches = itertools.count(1)
_older: list[jax.Array] = []  # ends of the half before
_newer: list[jax.Array] = []
_awaiting: list[int] = []  # launches that wait for a half: other threads launch no more meanwhile
_lock = threading.RLock()  # a signal handler, which runs in the thread that waits, may launch


@functools.cache
def is_throttled() -> bool:
    """Returns whether the number of programs in flight must be limited."""
    return (
        jax_compat.CPU_COLLECTIVES_NEED_THROTTLE
        and jax.default_backend() == "cpu"
        and jax.local_device_count() > 1
    )


@functools.cache
def _recorded_every() -> int:
    """Returns how many launches the end of one stands for; a job is joined before any."""
    return _HALF if job() is None else 1


def make_token() -> jax.Array:
    """Returns an extra program output: ready when the program is done, never donated.

    It costs ten microseconds on eight devices: a result that shows the end is better.
    """
    return jnp.zeros((), jnp.int8)


def throttle(end: jax.Array | None) -> None:
    """Records a launched program; waits for the older half when too many are in flight.

    Args:
      end: is ready when the program is done.
    """
    if end is None or isinstance(end, jax_compat.Tracer) or not is_throttled():
        return
    launch = next(_launches)
    if launch % _recorded_every() and not _awaiting:
        return
    with _lock:
        _newer.append(end)
        if launch % _HALF == 0:
            _awaiting.append(launch)
            try:
                _await_older()
            finally:
                _awaiting.clear()
            _older[:] = _newer
            _newer.clear()


def _await_older() -> None:
    """Waits until the older half is done; failures are reported to whoever reads the outputs."""
    # What the user has donated since tells nothing: then what came later does.
    ends = _older + _newer if any(end.is_deleted() for end in _older) else _older[:]
    for end in ends:
        with contextlib.suppress(RuntimeError):
            end.block_until_ready()
