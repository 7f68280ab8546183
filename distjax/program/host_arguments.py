"""Checksums of the numbers and small host arrays among the arguments of a call.

Each process of a job passes its own, so they may differ at any call. The paths to them are found
when a signature is compiled, so that a call visits only those leaves, not a whole tree of arrays.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import jax
import numpy as np

from distjax.typing import PyTree

#: The largest array that every call checks; larger ones are compared at a signature's first call.
_MAX_BYTES = 4096

#: The path to a leaf from (args, kwargs): each step is a function of a container and a key.
LeafPath = tuple[tuple[Callable[[Any, Any], Any], Any], ...]

_ARRAYS: Any = (np.ndarray, np.generic)
_pack = struct.Struct("d").pack


def find_host_leaves(
    args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> tuple[LeafPath, ...]:
    """Returns the paths to host numbers and arrays among the arguments."""
    given = (args, *_user_kwargs(kwargs))
    leaves = jax.tree_util.tree_leaves_with_path(given)
    on_host = [(i, *found) for i, found in enumerate(leaves) if _is_on_host(found[1])]
    try:
        return tuple(_find_leaf_path(given, path, leaf) for _, path, leaf in on_host)
    except (AttributeError, LookupError, TypeError):
        return tuple(((_leaf, i),) for i, _, _ in on_host)


def checksum(
    paths: tuple[LeafPath, ...], args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> int:
    """Returns a checksum of the small values at these paths, in under 1 us each."""
    found = 0
    leaf: Any
    given = (args, *_user_kwargs(kwargs)) if kwargs else (args,)
    for path in paths:
        leaf = given
        for get, key in path:
            leaf = get(leaf, key)
        if type(leaf) is float:
            found = crc32(_pack(leaf), found)
        elif isinstance(leaf, _ARRAYS):
            if leaf.nbytes <= _MAX_BYTES:
                try:
                    found = crc32(leaf, found)
                except (TypeError, ValueError):  # not contiguous, or of a dtype like bfloat16
                    found = crc32(leaf.tobytes(), found)
        elif isinstance(leaf, (int, complex)):
            found = crc32(b"%a," % leaf, found)  # a comma: 1 and 11 are not 11 and 1
    return found


def _is_on_host(leaf: PyTree) -> bool:
    return isinstance(leaf, (*_ARRAYS, int, float, complex))


def _user_kwargs(kwargs: Mapping[str, PyTree]) -> tuple[Any, ...]:
    """Returns the user's keyword arguments, without stateful objects among them."""
    return (getattr(kwargs, "kwargs", kwargs),) if kwargs else ()


def _find_leaf_path(tree: PyTree, keys: tuple[object, ...], leaf: PyTree) -> LeafPath:
    """Returns the path to `leaf` if JAX's keys lead there without running user code."""
    path = tuple(map(_step, keys))
    for get, key in path:
        if get is getattr and isinstance(getattr(type(tree), key, None), property):
            raise LookupError(key)
        tree = get(tree, key)
    if tree is not leaf:
        raise LookupError(path)
    return path


def _step(key: object) -> tuple[Callable[[Any, Any], Any], Any]:
    """Returns the accessor and key for one of JAX's tree keys."""
    match key:
        case jax.tree_util.SequenceKey(idx=where) | jax.tree_util.DictKey(key=where):
            return operator.getitem, where
        case jax.tree_util.GetAttrKey(name=where):
            return getattr, where
        case _:  # of a class that gives JAX its leaves without their names
            raise LookupError(key)


def _leaf(tree: PyTree, number: int) -> Any:
    return jax.tree.leaves(tree)[number]
