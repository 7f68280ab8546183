"""Lets users share a variable's buffers without losing them to a donation.

A read copies nothing: the user gets another array object over the stored buffers, a handle, which
is remembered by weak reference. A program that is about to donate the buffers of a living handle
copies them on the device first.

Readers and programs synchronize without a lock in the common case. A read registers its handle
*before* it checks whether the program that writes the variable is starting, or started in the
meantime; a program announces that it is starting *before* it checks what is registered. So at
least one of the two sees the other.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import jax

from distjax import jax_compat
from distjax.errors import message
from distjax.trees import first_leaf
from distjax.typing import PyTree
from distjax.variables.storage import OwnedArrays, StoredArray

#: The living arrays that share buffers with a variable, by `id`.
handed_out: dict[int, weakref.ref[jax.Array]] = {}
#: Without it, two threads that split an array into shards for the first time get different ones,
#: and each loses the handles that the other registers.
_registering = threading.RLock()


def hand_out(stored: StoredArray) -> jax.Array:
    """Returns another array over the stored buffers, remembered by weak reference.

    Raises:
      ContextError, RuntimeError: see `StoredArray.require`.
    """
    place, version = stored.place, stored.version
    if not _is_starting(place):
        with contextlib.suppress(Exception):  # donated or deleted meanwhile: retried below
            handle = _register(stored)
            if stored.place is place and stored.version == version and not _is_starting(place):
                return handle
    with stored.lock:  # no program is taking arrays now
        return _register(stored)


def _is_starting(place: tuple[OwnedArrays, int] | None) -> bool:
    return place is not None and place[0].is_starting


def _register(stored: StoredArray) -> jax.Array:
    array: Any = stored.require()  # may wait for stored.lock, whose holder may wait for the next
    with _registering:
        handle = jax_compat.another_handle(array)
        held = (handle, *(shard.data for shard in handle.addressable_shards))
        living = [r for r in stored.handles if r() is not None]
        stored.handles[:] = [*living, *map(weakref.ref, held)]
    for array in held:
        key = id(array)
        handed_out[key] = weakref.ref(array, functools.partial(_forget, key))
    if stored.place is not None:
        stored.place[0].aliased.append(stored)
    return handle


def _forget(key: int, _: weakref.ref[jax.Array]) -> None:
    handed_out.pop(key, None)


def reuse_components(stored: StoredArray, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the components, reusing array objects that users still hold.

    This makes ``value in local_results(value_container(value))`` true by identity; `==` on
    arrays has no single truth value.

    Args:
      stored: the variable's array.
      parts: its components, freshly split.
    """
    array = stored.require()
    former, before = stored.components
    if former is not None and former() is array:
        held = [reference() for reference in before]
        parts = tuple(new if old is None else old for old, new in zip(held, parts, strict=True))
    stored.components = weakref.ref(array), tuple(map(weakref.ref, parts))
    return parts


def copy_aliased(owned: OwnedArrays) -> None:
    """Copies, on the device, the arrays about to be donated that users still hold.

    Args:
      owned: the arrays of a program that is starting.
    """
    for stored in tuple(owned.aliased):
        if stored.place is None or stored.place[0] is not owned:
            continue
        array: Any = stored.require()
        handles = tuple(stored.handles)  # readers may change the list meanwhile
        if any(reference() is not None for reference in handles):
            owned.arrays[stored.place[1]] = _copy(array)
        stored.handles = []
    owned.aliased = []


def _copy(array: jax.Array) -> jax.Array:
    """Returns a copy, made shard by shard if the array spans several processes.

    Only this process may need a copy, so it cannot be a program run by all of them.
    """
    if array.is_fully_addressable:
        return jax.numpy.copy(array)
    shards = [jax.numpy.copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def copy_handles(args: tuple[Any, ...], numbers: Collection[int]) -> tuple[Any, ...]:
    """Returns the arguments, with copies of donated arrays that share variables' buffers.

    Args:
      args: positional arguments.
      numbers: the positions of those that are about to be donated.
    """
    if not handed_out:
        return args
    return tuple(
        jax.tree.map(lambda x: _copy(x) if _is_handle(x) else x, arg) if i in numbers else arg
        for i, arg in enumerate(args)
    )


def _is_handle(array: object) -> bool:
    reference = handed_out.get(id(array))
    return reference is not None and reference() is array


def require_undeleted(
    function: str, names: Sequence[str], numbers: Iterable[int], args: Sequence[PyTree]
) -> None:
    """Raises a RuntimeError if an argument to be donated was donated before.

    Checks only the first array of each argument, since the arrays of one argument are donated
    together. An argument passed by keyword is not donated.

    Args:
      function: the name of the function called.
      names: the names of its positional parameters.
      numbers: the positions of the arguments that the call donates.
      args: its positional arguments.
    """
    for number in numbers:
        if number >= len(args):
            continue
        leaf = first_leaf(args[number])
        is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax_compat.Tracer)
        if is_array and leaf.is_deleted():
            name = names[number] if number < len(names) else str(number)
            raise RuntimeError(_deleted_text(function, name, leaf))


def _deleted_text(function: str, argument: str, array: jax.Array) -> str:
    return message(
        f"{function} needs argument {argument} to hold arrays that were not donated",
        got=f"an array of {array.dtype}{list(array.shape)} that was donated before. Array has been "
        "deleted",
        why=f"{argument} is named in donate_argnums, so each call reuses its memory",
        fix=f"go on with what the call returns: {argument} = {function}({argument}, ...)",
    )
