"""Eager operations, compiled once per function and static arguments; a limit on launches in flight.

Before JAX 0.12, a CPU process with several devices hangs, and aborts after 40 s, once more
than about 30 programs with collectives are enqueued without any being awaited. There, at most
`MAX_IN_FLIGHT` programs run at a time: one more awaits the oldest of them, which is usually done by
then. Elsewhere nothing is awaited.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distjax._src import hooks, jax_compat, user_mesh
from distjax._src.typing import PyTree

# -- programs in flight ---------------------------------------------------------


MAX_IN_FLIGHT = 16

#: An output of each program in flight, oldest first.
_in_flight: collections.deque[jax.Array] = collections.deque()


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
    """Records a launched program; awaits the oldest in flight if there are too many.

    It takes no lock, which an exception in a signal handler could leave locked: of several threads
    that launch, each awaits a program of its own.
    """
    if completion is None or isinstance(completion, jax_compat.Tracer) or not is_throttled():
        return
    _in_flight.append(completion)
    if len(_in_flight) <= MAX_IN_FLIGHT:
        return
    try:
        while (oldest := _in_flight.popleft()).is_deleted():
            pass  # donated since, so it tells nothing: then what came later does
        oldest.block_until_ready()
    except IndexError:  # other threads await what is left
        pass
    except RuntimeError:  # a failure is reported to whoever reads the outputs
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

    Inside a trace, the call is inlined into it. `name` is the operation in the user's words, equal
    on all processes.
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
