"""Launching compiled programs, with a limit on how many are in flight.

Before JAX 0.12, a CPU process with several devices hangs, and aborts after 40 s, once more
than about 30 programs with collectives are enqueued without any being awaited. There, at most
`MAX_IN_FLIGHT` programs run at a time; then the older half of them is awaited, which is usually
done by then. Elsewhere nothing is awaited.

One array stands for the whole half: XLA makes a program on several of a process's CPU devices wait
for the end of the one that it launched before (`last_collective_launch_event`), so such programs
end in the order of their launch.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.cluster.job import job

MAX_IN_FLIGHT = 16
_HALF = MAX_IN_FLIGHT // 2

_in_flight: list[jax.Array] = []
_lock = threading.Lock()


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


def throttle(end: jax.Array | None) -> None:
    """Records a launched program; waits for the older half when too many are in flight.

    Args:
      end: is ready when the program is done.
    """
    if end is None or isinstance(end, jax_compat.Tracer) or not is_throttled():
        return
    with _lock:
        _in_flight.append(end)
        if len(_in_flight) < MAX_IN_FLIGHT:
            return
        started = tuple(_in_flight)
    _await_half(started)
    with _lock:  # only now, else other threads would launch as many again meanwhile
        if _in_flight and _in_flight[0] is started[0]:  # no other thread was here first
            del _in_flight[:_HALF]


def _await_half(started: Sequence[jax.Array]) -> None:
    """Waits until the older half is done; failures are reported to whoever reads the outputs."""
    if job() is not None:  # programs on one device of this process keep no order
        for each in started[: _HALF - 1]:
            with contextlib.suppress(RuntimeError):
                each.block_until_ready()
    for each in started[_HALF - 1 :]:
        with contextlib.suppress(RuntimeError):
            each.block_until_ready()
        if not each.is_deleted():  # otherwise the user has donated it: ask the next one
            return
