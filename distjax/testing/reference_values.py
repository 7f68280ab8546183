"""Values of R replicas in the reference interpreter: split, regrouped, reduced."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax import jax_compat
from distjax.collectives.ops import require_gather_axis, require_sums, sum_dtype
from distjax.errors import LocalityError, describe_value, message
from distjax.modes import ReduceOp
from distjax.placement.per_replica import PerReplica, is_per_replica, require_same_topology
from distjax.placement.topology import Topology
from distjax.replica.arguments import is_array
from distjax.typing import AxisLike, PyTree
from distjax.variables.conversion import is_number


def select(tree: PyTree, replica: int, topology: Topology, where: str) -> Any:
    """Returns one replica's view of a cross-replica tree."""

    def leaf(x: PyTree) -> Any:
        if isinstance(x, PerReplica):
            require_same_topology(x, topology, where)
            return x.stacked[replica]
        return jnp.asarray(x) if is_array(x) else x

    return jax.tree.map(leaf, tree, is_leaf=is_per_replica)


def regroup(trees: Sequence[Any], topology: Topology, where: str) -> Any:
    """Merges the trees of all replicas: equal leaves become one, others a PerReplica."""
    flat = [jax.tree.flatten(tree, is_leaf=is_per_replica) for tree in trees]
    treedef = flat[0][1]
    for _, other in flat:
        if other != treedef:
            raise LocalityError(_differing_text(where, f"a tree {treedef} and a tree {other}"))
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(treedef, [_regroup_column(c, topology, where) for c in columns])


def _regroup_column(column: Sequence[Any], topology: Topology, where: str) -> Any:
    first = column[0]
    if any(isinstance(x, PerReplica) for x in column):
        raise LocalityError(_differing_text(where, "a PerReplica that a replica closes over"))
    if not is_array(first) and all(x is first for x in column):
        return first
    if all(is_number(x) and type(x) is type(first) and x == first for x in column):
        return first
    if not all(is_array(x) or is_number(x) for x in column):
        if all(type(x) is type(first) and x == first for x in column):
            return first
        raise LocalityError(_differing_text(where, ", ".join(map(describe_value, column))))
    arrays = [jnp.asarray(x) for x in column]
    if any((a.shape, a.dtype) != (arrays[0].shape, arrays[0].dtype) for a in arrays):
        raise LocalityError(_differing_text(where, ", ".join(map(describe_value, arrays))))
    if all_equal(arrays):
        return arrays[0]
    return PerReplica(jnp.stack(arrays), topology)


def require_mean(op: ReduceOp, value: object, num_replicas: int) -> None:
    """Raises if a value that is not one per replica is to be summed over them."""
    if op is ReduceOp.MEAN or num_replicas == 1:
        return
    raise ValueError(
        message(
            "A non-DistributedValues value cannot be reduced with the given reduce op ReduceOp.SUM",
            got=describe_value(value),
            why="it is unclear whether it stands for one value or for R of them",
            fix="return it from strategy.run",
        )
    )


def all_equal(arrays: Sequence[jax.Array]) -> bool:
    """Returns whether the arrays are equal bit for bit."""
    return all(_content(a) == _content(arrays[0]) for a in arrays)


def _content(array: jax.Array) -> bytes:
    if jax_compat.is_key_dtype(array.dtype):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()


def _differing_text(where: str, got: str) -> str:
    return message(
        f"{where} needs the same tree, shapes, dtypes and Python objects from all replicas",
        got=got,
        why="only the numbers in arrays may differ per replica: a compiled program is traced once "
        "for all of them",
        fix="make the difference an array, or let it not depend on the replica",
    )


def components(value: PyTree, num_replicas: int) -> list[Any] | None:
    """Returns the replicas' values, or None for a value not on the replicas."""
    if isinstance(value, PerReplica):
        return [value.stacked[i] for i in range(num_replicas)]
    return [value] * num_replicas if isinstance(value, jax.Array) else None


def summable(op: ReduceOp, value: PyTree) -> jax.Array:
    """Returns `value` in the dtype in which `op` adds: floating-point for a mean."""
    array = jnp.asarray(value)
    require_sums(array.dtype, f"a {op.name.lower()} over the replicas")
    if op is ReduceOp.MEAN and not jnp.issubdtype(array.dtype, jnp.inexact):
        return array.astype(jnp.result_type(float))
    # The dtype is explicit because a sum, like a psum, is never weakly typed.
    return array.astype(jnp.int32 if array.dtype == jnp.bool_ else array.dtype)


def combine(op: ReduceOp, values: Sequence[Any]) -> jax.Array:
    """Returns the sum or mean of the replicas' values, added in replica order."""
    total = functools.reduce(operator.add, [summable(op, v) for v in values])
    return total / len(values) if op is ReduceOp.MEAN else total


def combine_within(op: ReduceOp, values: Sequence[Any], axis: AxisLike, mask: PyTree) -> jax.Array:
    """Returns the masked sum or mean over replicas and over `axis`.

    Args:
      op: SUM, or MEAN over all kept elements.
      values: a value [B, ...] per replica.
      axis: None, an int or a tuple of ints.
      mask: a bool array [B] per replica, or None.
    """
    axes = axis if axis is None or isinstance(axis, int) else tuple(axis)
    add: Callable[[Any], Any] = lambda x: x if axes is None else jnp.sum(x, axes, dtype=x.dtype)
    arrays = [summable(op, v) for v in values]
    dtype = arrays[0].dtype
    if op is ReduceOp.MEAN:
        arrays = [a.astype(sum_dtype(dtype)) for a in arrays]
    masks = mask or [jnp.ones((), bool)] * len(values)
    wide = [
        jnp.broadcast_to(m.reshape(m.shape + (1,) * (a.ndim - m.ndim)), a.shape)
        for m, a in zip(masks, arrays, strict=True)
    ]
    kept = [jnp.where(m, a, jnp.zeros_like(a)) for m, a in zip(wide, arrays, strict=True)]
    total = functools.reduce(operator.add, [add(x) for x in kept])
    if op is ReduceOp.SUM:
        return total
    counts = [add(m.astype(a.dtype)) for m, a in zip(wide, arrays, strict=True)]
    return (total / functools.reduce(operator.add, counts)).astype(dtype)


def concatenate(values: Sequence[Any], axis: int, method: str) -> jax.Array:
    """Returns the replicas' values concatenated along `axis`."""
    require_gather_axis(jnp.ndim(values[0]), axis, method)
    return jnp.concatenate([jnp.asarray(v) for v in values], axis)
