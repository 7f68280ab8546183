"""Elements of a dataset on the host: trees of numpy arrays, checked leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from distjax._src import jax_compat
from distjax._src.data.options import Batch
from distjax._src.placement import (
    HELD_FIX,
    PerReplica,
    is_per_replica,
    require_no_mask,
    wraps_around,
)
from distjax._src.typing import PyTree
from distjax.errors import BatchError, describe_value

_WHOLE_BYTES, _SAMPLE = 2**15, 2**12  # how much of an array a checksum covers


class HostTree(NamedTuple):
    """A flattened tree of numpy arrays, with the user's structure."""

    treedef: Any
    leaves: list[np.ndarray]

    @property
    def leading_size(self) -> int | None:
        """The leading dimension common to all leaves, or None."""
        sizes = {leaf.shape[:1] for leaf in self.leaves}
        return sizes.pop()[0] if len(sizes) == 1 and () not in sizes else None

    @property
    def signature(self) -> tuple[Any, list[Any]]:
        """Structure, shapes and dtypes; equal for elements that can be stacked."""
        return self.treedef, [(leaf.shape, leaf.dtype) for leaf in self.leaves]

    def copy(self) -> HostTree:
        """Returns a copy that owns its memory."""
        return HostTree(self.treedef, [leaf.copy() for leaf in self.leaves])

    def last_example(self, axis: int = 0) -> HostTree:
        """Returns a copy of the last row of each leaf, by default [1, ...]."""
        return HostTree(self.treedef, [leaf.take([-1], axis) for leaf in self.leaves])

    def filled(self, size: int, example: HostTree | None, axis: int = 0) -> HostTree:
        """Returns this element padded along an axis, to `size` rows, with copies of an example.

        That is one row of each leaf; zeros are used for one of other shapes or dtypes than this
        element's, and for None.
        """
        missing = size - self.leaves[0].shape[axis]
        if missing <= 0:
            return self
        shapes = [(*x.shape[:axis], 1, *x.shape[axis + 1 :]) for x in self.leaves]
        zeros = [np.zeros(to, x.dtype) for to, x in zip(shapes, self.leaves, strict=True)]
        row = HostTree(self.treedef, zeros)
        if example is not None and example.signature == row.signature:
            row = example
        pairs = zip(self.leaves, row.leaves, strict=True)
        leaves = [np.concatenate([x, np.repeat(last, missing, axis)], axis) for x, last in pairs]
        return HostTree(self.treedef, leaves)


def as_batch(tree: HostTree, mask: np.ndarray) -> HostTree:
    """Returns the leaves of ``Batch(tree, mask)``."""
    data = jax.tree.unflatten(tree.treedef, tree.leaves)
    leaves, treedef = jax.tree.flatten(Batch(data, mask))
    return HostTree(treedef, leaves)


def read_element(element: PyTree, name: str) -> HostTree:
    """Returns an element of the user's dataset as numpy arrays, in the user's memory; or raises.

    To keep it, copy it before reading the next one: a source may refill the buffer.
    """
    leaves, treedef = jax.tree.flatten(element, is_leaf=is_per_replica)
    if not leaves:
        raise BatchError(
            f"{name} needs at least one array",
            got=f"a tree without leaves: {describe_value(element)}",
            why="it is split along the leading dimension of its arrays",
            fix="yield an array, or a tree of them: {'x': x, 'y': y}",
        )
    arrays = [_as_numpy(leaf, treedef, i, name) for i, leaf in enumerate(leaves)]
    for i, array in enumerate(arrays):
        found = wraps_around(array)
        if found is not None:
            narrowed = jax.dtypes.canonicalize_dtype(array.dtype)
            raise BatchError(
                f"{name} needs integers that {narrowed} holds as leaf {leaf_path(treedef, i)}",
                got=f"{describe_value(array)} with values from {found}",
                why=f"JAX makes {narrowed} of {array.dtype}, and they would wrap around",
                fix=f"in the dataset, {HELD_FIX}",
            )
    return HostTree(treedef, arrays)


def checksum_of(tree: HostTree) -> int:
    """Returns a checksum of an element as the source gave it, to know it again.

    It covers arrays of up to 32 KiB whole; of a larger one, its shape and some 4,096 numbers from
    all over it. An element of another place in the data, which differs in most of its numbers,
    has another one.

    Cost: 4 to 75 microseconds an array, whatever its size.
    """
    checksum = zlib.crc32(repr(tree.signature[1]).encode())
    for leaf in tree.leaves:
        checksum = zlib.crc32(_sample(leaf).tobytes(), checksum)
    return checksum


def _sample(array: np.ndarray) -> np.ndarray:
    if array.nbytes <= _WHOLE_BYTES or array.size <= _SAMPLE:
        return array
    step = array.size // _SAMPLE
    while any(math.gcd(step, size) > 1 for size in array.shape[1:]):
        step += 1  # else it would meet the same columns in every row
    return array.reshape(-1)[::step] if array.flags.c_contiguous else array.flat[::step]


def _as_numpy(leaf: PyTree, treedef: jax.tree_util.PyTreeDef, index: int, name: str) -> np.ndarray:
    cause = None
    try:
        require_no_mask(leaf, name)
        array = np.asarray(leaf)
        if not array.dtype.isnative:  # as in files of another byte order, which JAX refuses
            array = array.astype(array.dtype.newbyteorder("="))
        if _is_array_dtype(array.dtype):
            return array
    except Exception as error:  # whatever the conversion of a foreign type raises
        cause = error
    raise BatchError(
        f"{name} needs arrays of numbers, leaf {leaf_path(treedef, index)} is not an array",
        got=describe_value(leaf),
        why="the values of the replicas are slices of one array: sparse, ragged, text and "
        "Python-object values, PRNG keys and values that are already distributed cannot be",
        fix=_fix_of(leaf),
    ) from cause


def _fix_of(leaf: PyTree) -> str:
    if isinstance(leaf, PerReplica):
        return "iterate over it as it is: it is distributed already"
    if isinstance(leaf, jax.Array) and jax_compat.is_key_dtype(leaf.dtype):
        return (
            "jax.random.key_data(keys) in the dataset, and jax.random.wrap_key_data(data) in the "
            "step; or a key beside the batch, and dj.get_replica_context().fold_in(key) in the step"
        )
    if isinstance(leaf, Mapping):
        return "a dict in its place, in the dataset: dict(batch)"
    if dataclasses.is_dataclass(leaf):
        return f"make it a pytree, once: jax.tree_util.register_dataclass({type(leaf).__name__})"
    return "turn it into a dense array (padded, or as ids) in the dataset"


@functools.lru_cache
def _is_array_dtype(dtype: np.dtype) -> bool:
    """Returns whether JAX has arrays of `dtype` (not of timedeltas or 128-bit floats)."""
    if dtype.kind == "m" or (dtype.kind in "fc" and np.finfo(dtype).bits > 64):
        return False
    return jax.dtypes.issubdtype(dtype, np.number) or dtype == np.bool_


def require_leading_size(tree: HostTree, name: str) -> int:
    """Returns the leading dimension common to all leaves, or raises a BatchError."""
    size = tree.leading_size
    if size is not None:
        return size
    sizes = [
        f"{leaf_path(tree.treedef, i)} has {leaf.shape[0] if leaf.shape else 'none (a scalar)'}"
        for i, leaf in enumerate(tree.leaves)
    ]
    raise BatchError(
        f"{name} needs arrays with one common leading dimension",
        got=", ".join(sizes[:8]) + (", ..." if len(sizes) > 8 else ""),
        why="a batch [G, ...] is split into [G / R, ...] for each replica",
        fix="batch the examples first: {'x': np.stack(xs), 'y': np.stack(ys)}; for one element "
        "per replica, of any rank: strategy.distribute_datasets_from_function",
    )


def leaf_path(treedef: jax.tree_util.PyTreeDef, index: int) -> str:
    """Returns a leaf's path as users write it, e.g. "['x'][0]"."""
    numbered = jax.tree.unflatten(treedef, range(treedef.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
    return jax.tree_util.keystr(paths[index]) or "(the element itself)"
