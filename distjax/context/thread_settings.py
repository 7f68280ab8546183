"""What belongs to a thread, and has to go along where we call something on another."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import jax

from distjax.context import frames


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
