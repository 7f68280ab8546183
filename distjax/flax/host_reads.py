"""Variables in host memory as code outside of `run` and `dj.jit` reads them: on the devices.

Such code (a call of the model, `nnx.jit`) computes on the devices, and JAX refuses to
compute with one operand in each memory. A hook in the variable's metadata, which Flax
calls for what is read, copies it. In a program distjax does the copying: while a step is traced
the variables are without the hook, so that what it makes of them has the user's metadata only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from distjax.typing import PyTree

_HOOKS = "on_get_value"  # Flax's name in the metadata: a function, or a tuple of them


def on_devices(variable: nnx.Variable[Any], value: PyTree) -> Any:
    """Returns what was read of a variable, host arrays as copies on their devices."""
    del variable
    return jax.tree.map(_on_devices, value)


def _on_devices(x: PyTree) -> Any:
    if isinstance(x, jax.Array) and jax.typeof(x).memory_space is jax.memory.Space.Host:
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def add_hooks(variables: Iterable[Any]) -> bool:
    """Gives the hook to those of `variables` without it; returns whether there were any."""
    bare = [v for v in variables if on_devices not in _hooks(v)]
    for variable in bare:
        variable.set_metadata(_HOOKS, (on_devices, *_hooks(variable)))
    return bool(bare)


def has_hook(variable: nnx.Variable[Any]) -> bool:
    """Returns whether a variable has the hook."""
    return on_devices in _hooks(variable)


def metadata_without(variable: nnx.Variable[Any]) -> dict[str, Any]:
    """Returns the metadata of a variable without the hook."""
    metadata = variable.get_metadata()
    if has_hook(variable):
        others = tuple(hook for hook in _hooks(variable) if hook is not on_devices)
        del metadata[_HOOKS]
        metadata.update({_HOOKS: others} if others else {})
    return metadata


def _hooks(variable: nnx.Variable[Any]) -> tuple[Any, ...]:
    hooks = variable.get_metadata().get(_HOOKS, ())
    return hooks if isinstance(hooks, tuple) else (hooks,)
