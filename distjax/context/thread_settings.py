"""What belongs to a thread, and has to go along where we call something on another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax

from distjax.context import frames

_Contexts = Mapping[str, Callable[[Any], contextlib.AbstractContextManager[Any]]]

#: Modes of JAX that change values and places.
_MODES: _Contexts = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_device": jax.default_device,
}
#: Modes that matter when a program runs, not when it is traced: of its values, what checks its
#: results, what may move.
_MODES_OF_CALLS: _Contexts = {
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
    stack, enter_modes = frames.stack(), _modes_of_this_thread(_MODES)

    @contextlib.contextmanager
    def enter_settings() -> Generator[None]:
        with frames.with_stack(stack), enter_modes():
            yield

    return enter_settings


def modes_of_this_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns what gives another thread the modes in which the calling one calls programs.

    As `jax.debug_nans` and `jax.transfer_guard` set them.
    """
    return _modes_of_this_thread(_MODES_OF_CALLS)


def _modes_of_this_thread(
    contexts: _Contexts,
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    config: Any = jax.config  # these are this thread's; pyright does not see them
    wanted = [(name, getattr(config, name)) for name in contexts]

    @contextlib.contextmanager
    def enter_modes() -> Generator[None]:
        differing = [(name, value) for name, value in wanted if value != getattr(config, name)]
        with contextlib.ExitStack() as modes:
            for name, value in differing:
                modes.enter_context(contexts[name](value))
            yield

    return enter_modes
