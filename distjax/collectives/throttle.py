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

import functools
import itertools
import threading

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.cluster.job import job

MAX_IN_FLIGHT = 16
_HALF = MAX_IN_FLIGHT // 2

# Counted in C, since each call of a program does: 0 for a launch that ends a half.
count_launch = itertools.cycle((*range(1, _HALF), 0)).__next__
_older: list[jax.Array] = []  # ends of the half before
_newer: list[jax.Array] = []
awaiting: list[None] = []  # not empty while a half is awaited: other threads launch no more
_lock = threading.RLock()  # a signal handler, which runs in the thread that waits, may launch


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
    with _lock:
        _newer.append(completion)
        if launch == 0:
            awaiting.append(None)
            try:
                _await_older()
            finally:
                awaiting.clear()
            _older[:] = _newer
            _newer.clear()


def _await_older() -> None:
    """Waits until the older half is done; failures are reported to whoever reads the outputs."""
    ends = _older
    for end in _older:
        if end.is_deleted():  # donated since, so it tells nothing: then what came later does
            ends = _older + _newer
            break
    for end in ends:
        try:
            end.block_until_ready()
        except RuntimeError:
            pass
