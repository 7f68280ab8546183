"""Reductions and gathering in the replica view, and checks of what can be reduced and gathered."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distjax._src import jax_compat
from distjax._src.typing import ArrayLike, DTypeLike, PyTree, ReduceOp, ReduceOpLike
from distjax.errors import describe_value, is_int, message


def as_reduce_op(op: ReduceOpLike, where: str = "op") -> ReduceOp:
    """Returns the ReduceOp named by `op`.

    Args:
      op: a ReduceOp, its name in any case, or VariableAggregation.SUM / MEAN
        (accepted by TF 1.12 and 1.13).
      where: the user's name for the argument.

    Raises:
      ValueError: `op` is anything else.
    """
    name = str(op if isinstance(op, str) else getattr(op, "name", "")).upper()
    is_ours = isinstance(op, str) or type(op).__name__ in ("ReduceOp", "VariableAggregation")
    if is_ours and name in ReduceOp.__members__:
        return ReduceOp[name]
    raise ValueError(
        message(
            f"{where} needs a ReduceOp: ReduceOp.SUM, ReduceOp.MEAN, 'sum', 'mean' (in any "
            "case), VariableAggregation.SUM or VariableAggregation.MEAN",
            got=f"{op!r} is not a valid ReduceOp" if isinstance(op, str) else describe_value(op),
            why="these are the two ways in which values of replicas combine",
            fix="'sum' or 'mean'; the operation comes first in strategy.reduce('sum', x), "
            "ctx.all_reduce('sum', x)",
        )
    )


def mean_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype of a mean: true division, so integers give the default float."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.dtype(dtype)
    return jnp.dtype(jax.dtypes.canonicalize_dtype(float))


def sum_dtype(dtype: DTypeLike) -> Any:
    """Returns the dtype in which sums behind a mean are computed: at least float32.

    float16 ends at 65504, which a sum or a count exceeds although the mean does not.
    """
    with jax.numpy_dtype_promotion("standard"):  # the user's "strict" would raise
        return jnp.promote_types(dtype, jnp.float32)


def require_sums(dtype: DTypeLike, method: str) -> None:
    """Raises a TypeError for PRNG keys."""
    if not jax_compat.is_key_dtype(dtype):
        return
    raise TypeError(
        message(
            f"{method} needs numbers, not PRNG keys",
            got=f"dtype {dtype}",
            why="keys have neither a sum nor a mean",
            fix="ctx.fold_in(key) for a key per replica; ctx.all_gather(key[None], axis=0) to see "
            "all of them",
        )
    )


def all_reduce(op: ReduceOp, x: ArrayLike, axis_name: str, num_replicas: int) -> Any:
    """Returns the sum or mean of `x` over the replica axis, on every replica.

    Its derivative is the same all-reduce applied to the cotangents.
    """
    total = lax.psum(as_summand(op, x, "all_reduce"), axis_name)
    return from_total(op, total, num_replicas)


def as_summand(op: ReduceOp, x: ArrayLike, method: str) -> jax.Array:
    """Returns `x` as `op` adds it up: of the dtype of the result, and strongly typed, like psum."""
    x = jnp.asarray(x)  # psum of a Python number would return a Python number
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return x.astype(x.dtype)
    require_sums(x.dtype, method)
    if op is ReduceOp.MEAN:
        return x.astype(mean_dtype(x.dtype))
    return x.astype(jnp.int32 if x.dtype == jnp.bool_ else x.dtype)


def from_total(op: ReduceOp, total: jax.Array, num_replicas: int) -> jax.Array:
    """Returns the result of `op` from the sum over the replicas."""
    return total if op is ReduceOp.SUM else total / num_replicas


#: The scope of the library's own uses of the replica's number: no result depends on it.
OWN_INDEX = "distjax_own_index"


def own_index(axis_name: str) -> jax.Array:
    """Returns the replica's number, to find its part of a value that is equal on all."""
    with jax.named_scope(OWN_INDEX):
        return lax.axis_index(axis_name)


def from_first_replica(x: ArrayLike, axis_name: str) -> jax.Array:
    """Returns replica 0's `x` on every replica."""
    x = jnp.asarray(x)
    if jax_compat.is_key_dtype(x.dtype):
        first = from_first_replica(jax.random.key_data(x), axis_name)
        return jax.random.wrap_key_data(first, impl=jax.random.key_impl(x))
    is_first = own_index(axis_name) == 0
    as_number = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    kept = jnp.where(is_first, as_number, jnp.zeros_like(as_number))
    return lax.psum(kept, axis_name).astype(x.dtype)


def combine(rule: str, x: ArrayLike, axis_name: str, num_replicas: int) -> jax.Array:
    """Returns the replicas' `x` as one value on every replica, by a rule: SUM, MEAN or FIRST."""
    if rule == "FIRST":
        return from_first_replica(x, axis_name)
    return all_reduce(ReduceOp[rule], x, axis_name, num_replicas)


def require_gather_axis(ndim: int, axis: object, method: str) -> None:
    """Raises a ValueError unless `axis` is an axis of a value with `ndim` axes."""
    if is_int(axis) and 0 <= axis < ndim:
        return
    raise ValueError(
        message(
            f"{method} needs an axis between 0 and {ndim - 1}"
            if ndim
            else f"{method} needs a value with at least one axis",
            got=f"axis {describe_value(axis)} of a value with {ndim} axes",
            why="the replicas' values are concatenated along one of their axes",
            fix=f"{method}(value, axis=0)"
            if ndim
            else f"{method}(x[None], axis=0); of a PerReplica: x.map(lambda value: value[None])",
        )
    )


def all_gather(x: jax.Array, axis: int, axis_name: str) -> jax.Array:
    """Returns the replicas' `x` concatenated along `axis`, on every replica."""
    if x.shape[axis] == 0 and not jax_compat.is_key_dtype(x.dtype):
        return jnp.zeros_like(x)  # nothing to gather, and JAX cannot lower it (0.10 to 0.12)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def is_sparse(value: object) -> bool:
    """Returns whether `value` is a JAX sparse array; imports nothing."""
    sparse = sys.modules.get("jax.experimental.sparse")
    return sparse is not None and isinstance(value, sparse.JAXSparse)


def require_dense(tree: PyTree, method: str) -> None:
    """Raises a NotImplementedError if a leaf of `tree` is a sparse array.

    JAX treats it as a pytree of data and indices; reducing those separately would be
    meaningless.
    """
    for leaf in jax.tree.leaves(tree, is_leaf=is_sparse):
        if is_sparse(leaf):
            raise NotImplementedError(
                message(
                    f"{method} needs dense arrays, not sparse ones",
                    got=describe_value(leaf),
                    why="the replicas' sparse arrays have indices of their own",
                    fix="x.todense() in the replica function, before it is returned or reduced",
                )
            )
