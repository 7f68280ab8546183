"""Copies variables in host memory to the devices when code outside a program reads them.

Such code (a call of the model, `nnx.jit`) computes on the devices, and JAX rejects operands
in different memories. So a hook in the variable's metadata, which Flax applies to each read,
copies the value. In a program distjax makes the copy itself: while a step is traced the hook is
removed, so that variables made from these inherit only the user's metadata.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from distjax.placement.topology import is_host_memory
from distjax.typing import PyTree

_HOOKS = "on_get_value"  # Flax's metadata key; its value is a function or a tuple of them


class _Hooks(tuple[Any, ...]):
    """Hooks of which Flax does not warn.

    `nnx.Optimizer` gives its state the metadata of the parameters, and Flax warns that hooks are
    deprecated where a new variable has any (where their truth value is true): hooks that the user
    has never heard of. Flax calls them whatever their truth value is.
    """

    def __bool__(self) -> bool:
        return False


def on_devices(variable: nnx.Variable[Any], value: PyTree) -> Any:
    """Returns the value read from a variable, with host arrays copied to their devices."""
    del variable
    return jax.tree.map(_on_devices, value)


def _on_devices(x: PyTree) -> Any:
    if isinstance(x, jax.Array) and jax.typeof(x).memory_space is jax.memory.Space.Host:
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def add_hooks(variables: Iterable[Any]) -> bool:
    """Adds the hook to those of `variables` that lack it; returns whether any did."""
    bare = [v for v in variables if on_devices not in _hooks(v)]
    for variable in bare:
        variable.set_metadata(_HOOKS, _Hooks((on_devices, *_hooks(variable))))
    return bool(bare)


def is_in_host_memory(variable: nnx.Variable[Any]) -> bool:
    """Returns whether an array of a variable is in host memory."""
    arrays = jax.tree.leaves(variable.get_raw_value())
    return any(isinstance(x, jax.Array) and is_host_memory(x.sharding) for x in arrays)


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
