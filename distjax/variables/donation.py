"""Arrays that users hold over the storage of variables, and what donation does to them.

Reads copy nothing: what a user gets is another handle on the stored buffers, remembered by weak
reference. Before a program donates a buffer that somebody still holds, it copies it on the device.

Neither side waits for the other where nothing runs. A read registers its handle *before* it looks
whether the program that writes the variable is being started, or was meanwhile; the program says
that it is *before* it looks at what is registered. So one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, TypeVar

import jax

from distjax import jax_compat
from distjax.variables.storage import SteppedArrays, StoredArray

T = TypeVar("T")

#: Arrays over the buffers of variables, by identity.
_handed_out: dict[int, weakref.ref[jax.Array]] = {}
#: Held for a moment: two threads that first take one array apart leave JAX with each shard twice.
_taking_apart = threading.RLock()


def hand_out(stored: StoredArray) -> jax.Array:
    """Returns a handle on the stored array, and remembers it by weak reference.

    Raises:
      ContextError, RuntimeError: as `StoredArray.require`.
    """
    place, version = stored.place, stored.version
    if not _is_starting(place):
        with contextlib.suppress(Exception):  # donated meanwhile, or deleted: the lock tells
            handle = _register(stored)
            if stored.place is place and stored.version == version and not _is_starting(place):
                return handle
    with stored.lock:  # what a program takes, it has taken
        return _register(stored)


def _is_starting(place: tuple[SteppedArrays, int] | None) -> bool:
    return place is not None and place[0].is_starting


def _register(stored: StoredArray) -> jax.Array:
    array: Any = stored.require()  # before: it may wait for the lock, whose holder may come here
    with _taking_apart:
        handle = jax_compat.another_handle(array)
        held = (handle, *(shard.data for shard in handle.addressable_shards))
    for array in held:
        key = id(array)
        _handed_out[key] = weakref.ref(array, functools.partial(_forget, key))
    living = [r for r in stored.handles if r() is not None]
    stored.handles = [*living, *map(weakref.ref, held)]
    if stored.place is not None:
        stored.place[0].aliased.append(stored)
    return handle


def _forget(key: int, _: weakref.ref[jax.Array]) -> None:
    _handed_out.pop(key, None)


def reuse_components(stored: StoredArray, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns components as the very arrays that were handed out before, and are held.

    ``value in local_results(value_container(value))`` is true by identity, then: arrays
    have no one truth value to be compared by.

    Args:
      stored: the array of a variable.
      parts: its components, cut from it now.
    """
    array = stored.require()
    former, before = stored.components
    if former is not None and former() is array:
        held = [reference() for reference in before]
        parts = tuple(new if old is None else old for old, new in zip(held, parts, strict=True))
    stored.components = weakref.ref(array), tuple(map(weakref.ref, parts))
    return parts


def copy_aliased(stepped: SteppedArrays) -> None:
    """Copies, on the device, arrays that are about to be donated and that a user still holds.

    Args:
      stepped: the arrays of a program that is being started.
    """
    for stored in tuple(stepped.aliased):
        if stored.place is None or stored.place[0] is not stepped:
            continue
        array: Any = stored.require()
        if any(reference() is not None for reference in stored.handles):
            stepped.arrays[stored.place[1]] = _copy(array)
        stored.handles = []
    stepped.aliased = []


def _copy(array: jax.Array) -> jax.Array:
    """Returns a copy, over several processes shard by shard.

    Whether one is needed depends on what a process still holds: it is no program of all of them.
    """
    if array.is_fully_addressable:
        return jax.numpy.copy(array)
    shards = [jax.numpy.copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def copy_handles(tree: T) -> T:
    """Returns `tree` with a copy in place of each array that shares a variable's buffers.

    For arguments that are about to be donated: the variable keeps its value.
    """
    if not _handed_out:
        return tree
    return jax.tree.map(lambda x: _copy(x) if _is_handle(x) else x, tree)


def _is_handle(array: object) -> bool:
    reference = _handed_out.get(id(array))
    return reference is not None and reference() is array
