"""What belongs to a thread, and has to go along where we call something on another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import jax

from distjax.context import frames

#: Modes of JAX that a thread has of its own and that matter when a program runs, not when it is
#: traced: what checks its results, and what may move.
_MODES_OF_CALLS: dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]] = {
    "jax_enable_x64": jax.enable_x64,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
    "jax_transfer_guard_host_to_device": jax.transfer_guard_host_to_device,
    "jax_transfer_guard_device_to_device": jax.transfer_guard_device_to_device,
    "jax_transfer_guard_device_to_host": jax.transfer_guard_device_to_host,
}


def settings_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns what makes another thread see the context of the calling one.

    That is the stack of frames, and of JAX what changes values and places: 64-bit mode
    and the default device.
    """
    stack = frames.stack()
    config: Any = jax.config  # these two are this thread's; pyright does not see them
    x64, device = config.jax_enable_x64, config.jax_default_device

    @contextlib.contextmanager
    def enter_settings() -> Generator[None]:
        with frames.with_stack(stack), jax.enable_x64(x64), jax.default_device(device):
            yield

    return enter_settings


def modes_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns what gives another thread the modes in which the calling one calls programs.

    As `jax.debug_nans` and `jax.transfer_guard` set them.
    """
    config: Any = jax.config
    wanted = [(name, getattr(config, name)) for name in _MODES_OF_CALLS]

    @contextlib.contextmanager
    def enter_modes() -> Generator[None]:
        with contextlib.ExitStack() as modes:
            for name, value in wanted:
                if value is not None and value != getattr(config, name):
                    modes.enter_context(_MODES_OF_CALLS[name](value))
            yield

    return enter_modes
