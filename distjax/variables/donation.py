"""Arrays of variables that were handed out, and are copied before their buffers are donated."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import jax

from distjax import jax_compat

#: Held while stored arrays are handed out, while they are donated and replaced, and while traced
#: objects are where a function refers to the user's. One lock, so that no two wait for each other.
storage_lock = threading.RLock()

#: Variables whose stored array a user may hold, by serial number.
aliased_variables: dict[int, weakref.ref[Any]] = {}


def alias_storage(variable: Any) -> jax.Array:
    """Returns a handle on the stored array and remembers it by weak reference."""
    with storage_lock:
        handle = jax_compat.another_handle(variable.storage)
        held = [weakref.ref(handle), *(weakref.ref(s.data) for s in handle.addressable_shards)]
        variable.aliases = [r for r in variable.aliases if r() is not None] + held
        aliased_variables[variable.serial_number] = weakref.ref(variable)
    return handle


def reuse_aliases(variable: Any, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns components as the very arrays that were handed out before, and are held.

    ``value in local_results(value_container(value))`` is true by identity, then: arrays
    have no one truth value to be compared by.

    Args:
      variable: the variable.
      parts: its components, cut from the stored array now.
    """
    stored, before = variable.aliased_components
    if stored is not None and stored() is variable.storage:
        held = [reference() for reference in before]
        parts = tuple(new if old is None else old for old, new in zip(held, parts, strict=True))
    references = tuple(weakref.ref(part) for part in parts)
    variable.aliased_components = weakref.ref(variable.storage), references
    return parts


def copy_aliased_storage(to_donate: frozenset[Any]) -> None:
    """Copies, on the device, stored arrays that a user still holds.

    Called before the storage of the variables `to_donate` is donated; copies
    nothing that nobody holds.
    """
    for serial_number, reference in list(aliased_variables.items()):
        variable = reference()
        if variable is not None and variable not in to_donate:
            continue
        if variable is not None and any(r() is not None for r in variable.aliases):
            variable.storage = jax.numpy.copy(variable.storage)
            variable.aliases = []
        aliased_variables.pop(serial_number, None)
