"""Settings of a thread that code run on another thread needs: its frames and its JAX modes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax

from distjax.context import frames

_Contexts = Mapping[str, Callable[[Any], contextlib.AbstractContextManager[Any]]]

#: JAX modes that change values.
_MODES_OF_VALUES: _Contexts = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_matmul_precision": jax.default_matmul_precision,
    "jax_default_prng_impl": jax.default_prng_impl,
    "jax_numpy_dtype_promotion": jax.numpy_dtype_promotion,
    "jax_threefry_partitionable": jax.threefry_partitionable,
}
#: JAX modes that change values and placement.
_MODES: _Contexts = {**_MODES_OF_VALUES, "jax_default_device": jax.default_device}
#: Modes that matter wherever a program runs: those that change values or check results.
_MODES_OF_PROGRAMS: _Contexts = {
    **_MODES_OF_VALUES,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
}
#: The same within this process, plus the guards on transfers that the user can observe.
_MODES_OF_CALLS: _Contexts = {
    **_MODES_OF_PROGRAMS,
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
}


def settings_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context factory that gives another thread this thread's context.

    That is the stack of frames and the JAX modes that change values and placement, such as
    64-bit mode, the implementation of random keys and the default device.
    """
    stack, enter_modes = frames.stack(), _modes_of_this_thread(_MODES)

    @contextlib.contextmanager
    def enter_settings() -> Generator[None]:
        with frames.with_stack(stack), enter_modes():
            yield

    return enter_settings


def modes_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a context factory with this thread's JAX modes for calling programs.

    For example those set by `jax.debug_nans` and `jax.transfer_guard`.
    """
    return _modes_of_this_thread(_MODES_OF_CALLS)


@dataclasses.dataclass(frozen=True)
class ProgramModes:
    """The modes in which a thread calls programs, to be sent to another process.

    Attributes:
      values: one per mode, in the order of this module's table.
    """

    values: tuple[Any, ...]

    @classmethod
    def of_this_thread(cls) -> ProgramModes:
        """Returns the modes of the calling thread."""
        config: Any = jax.config
        return cls(tuple(getattr(config, name) for name in _MODES_OF_PROGRAMS))

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the calling thread has these modes."""
        wanted = list(zip(_MODES_OF_PROGRAMS, self.values, strict=True))
        return _enter_modes(_MODES_OF_PROGRAMS, wanted)


def _modes_of_this_thread(
    contexts: _Contexts,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    config: Any = jax.config  # thread-local values, unknown to pyright
    wanted = [(name, getattr(config, name)) for name in contexts]

    return lambda: _enter_modes(contexts, wanted)


@contextlib.contextmanager
def _enter_modes(contexts: _Contexts, wanted: Sequence[tuple[str, Any]]) -> Generator[None]:
    config: Any = jax.config
    differing = [(name, value) for name, value in wanted if value != getattr(config, name)]
    with contextlib.ExitStack() as modes:
        for name, value in differing:
            modes.enter_context(contexts[name](value))
        yield
