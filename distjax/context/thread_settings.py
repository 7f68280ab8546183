"""What belongs to a thread, and has to go along where we call something on another."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax

from distjax.context import frames

_Contexts = Mapping[str, Callable[[Any], contextlib.AbstractContextManager[Any]]]

#: Modes of JAX that change values and places.
_MODES: _Contexts = {
    "jax_enable_x64": jax.enable_x64,
    "jax_default_device": jax.default_device,
}
#: Modes that matter when a program runs, wherever it does: of its values, what checks its results.
_MODES_OF_PROGRAMS: _Contexts = {
    "jax_enable_x64": jax.enable_x64,
    "jax_debug_nans": jax.debug_nans,
    "jax_debug_infs": jax.debug_infs,
}
#: The same in this process, where arrays move in the user's sight.
_MODES_OF_CALLS: _Contexts = {
    **_MODES_OF_PROGRAMS,
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


@dataclasses.dataclass(frozen=True)
class ProgramModes:
    """The modes in which a thread calls programs, for a thread of another process.

    Attributes:
      values: of each mode, in the order that this module has them in.
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
    config: Any = jax.config  # these are this thread's; pyright does not see them
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
