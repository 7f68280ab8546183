"""Settings of a thread that code run on another thread needs: its frames and its JAX modes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax

from distjax._src.context import frames

#: The contexts of JAX modes that matter to another thread, or to another process.
_CONTEXTS: Mapping[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_threefry_partitionable": jax.threefry_partitionable,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
    "jax_default_device": jax.default_device,
}
_NAMES = tuple(_CONTEXTS)
#: Modes that change values.
_OF_VALUES = _NAMES[:5]
#: Modes that matter wherever a program runs: those that change values or check results.
_OF_PROGRAMS = _NAMES[:7]
#: The same within this process, plus the guards on transfers that the user can observe.
_OF_CALLS = _NAMES[:10]


@dataclasses.dataclass(frozen=True)
class ProgramModes:
    """JAX modes of a thread, which another thread or process can enter.

    Attributes:
      values: by the name of the mode.
    """

    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of_this_thread(cls, names: Sequence[str] = _OF_PROGRAMS) -> ProgramModes:
        """Returns the modes in which the calling thread calls programs."""
        config: Any = jax.config  # thread-local values, unknown to pyright
        return cls(tuple((name, getattr(config, name)) for name in names))

    @contextlib.contextmanager
    def __call__(self) -> Generator[None]:
        """A context in which the calling thread has these modes."""
        config: Any = jax.config
        differing = [(n, value) for n, value in self.values if value != getattr(config, n)]
        with contextlib.ExitStack() as modes:
            for name, value in differing:
                modes.enter_context(_CONTEXTS[name](value))
            yield


def settings_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context factory that gives another thread this thread's context.

    That is the stack of frames and the JAX modes that change values and placement, such as
    64-bit mode, the implementation of random keys and the default device.
    """
    stack = frames.stack()
    modes = ProgramModes.of_this_thread((*_OF_VALUES, "jax_default_device"))

    @contextlib.contextmanager
    def enter_settings() -> Generator[None]:
        with frames.with_stack(stack), modes():
            yield

    return enter_settings


def modes_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context factory with this thread's JAX modes for calling programs.

    For example those set by `jax.debug_nans` and `jax.transfer_guard`.
    """
    return ProgramModes.of_this_thread(_OF_CALLS)
