"""Reductions, gathering and broadcasting in the global view.

These functions take arrays and static arguments, and are meant to be called through
`eager.call_compiled`. An array that is equal on every replica counts as R copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distjax.collectives import ops
from distjax.collectives.communication import DEFAULT_OPTIONS, CommunicationOptions
from distjax.collectives.mapping import map_replicas
from distjax.collectives.packing import sum_over_replicas
from distjax.masks import spread_mask
from distjax.modes import ReduceOp
from distjax.placement.topology import Topology


def reduce_arrays(
    arrays: Sequence[Any],
    topology: Topology,
    op: ReduceOp,
    varying: tuple[bool, ...],
    axes: tuple[int, ...],
    options: CommunicationOptions = DEFAULT_OPTIONS,
    splits: tuple[Any, ...] = (),
) -> list[jax.Array]:
    """Returns each array summed or averaged over the replicas.

    Args:
      arrays: global arrays, [R, ...] if they vary, else [...].
      topology: the R replicas.
      op: SUM or MEAN.
      varying: per array, whether replicas have different values.
      axes: axes of each replica's value to reduce over as well; a mean is then over all
        elements of all replicas.
      options: how varying values are communicated.
      splits: per array, the local form if the result is to be split over the replicas (by a
        single reduce-scatter), else None; () for none at all.
    """
    count = topology.num_replicas
    splits = splits or (None,) * len(varying)
    scattered = [
        varies and split is not None for varies, split in zip(varying, splits, strict=True)
    ]

    def on_replica(*local: jax.Array) -> list[Any]:
        inner = [ops.as_summand(op, _within(op, x, axes), "reduce") for x in local]
        kinds = list(zip(inner, varying, scattered, splits, strict=True))
        whole = [x for x, varies, is_scattered, _ in kinds if varies and not is_scattered]
        summed = iter(sum_over_replicas(whole, topology, options))
        reduced = []
        for x, varies, is_scattered, split in kinds:
            if not varies:
                reduced.append(x * count if op is ReduceOp.SUM else x)
            elif is_scattered:
                reduced.append(split.reduce(op, x, topology))
            else:
                reduced.append(ops.from_total(op, next(summed), count))
        return reduced

    arrays = [jnp.asarray(a) for a in arrays]
    outs = map_replicas(topology, on_replica, arrays, varying, scattered)
    return [
        split.from_replicas(x) if is_scattered else x
        for x, is_scattered, split in zip(outs, scattered, splits, strict=True)
    ]


def _within(op: ReduceOp, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    if not axes:
        return x
    if op is ReduceOp.MEAN:
        return jnp.mean(x.astype(ops.mean_dtype(x.dtype)), axis=axes)
    return lax.reduce_sum(x, axes) if x.dtype != jnp.bool_ else jnp.sum(x, axis=axes)


def reduce_masked(
    arrays: tuple[Any, Any],
    topology: Topology,
    op: ReduceOp,
    varying: tuple[bool, bool],
    axes: tuple[int, ...],
) -> jax.Array:
    """Returns the sum or mean over replicas of the elements where the mask is True.

    Args:
      arrays: (value, mask): a value [B, ...] and a mask [B] (its shape may be any leading
        part of the value's), each with a leading replica axis if it varies.
      topology: the R replicas.
      op: SUM, or MEAN over the unmasked elements.
      varying: whether value and mask differ per replica.
      axes: axes of the value to reduce over as well.
    """

    def on_replica(value: jax.Array, mask: jax.Array) -> list[Any]:
        mask = spread_mask(mask, value.shape)
        kept = ops.as_summand(op, jnp.where(mask, value, jnp.zeros_like(value)), "reduce")
        wide = kept.dtype if op is ReduceOp.SUM else ops.sum_dtype(kept.dtype)
        total = lax.psum(jnp.sum(kept, axis=axes, dtype=wide), topology.axis_name)
        if op is ReduceOp.SUM:
            return [total]
        count = lax.psum(jnp.sum(mask, axis=axes, dtype=wide), topology.axis_name)
        return [(total / count).astype(kept.dtype)]

    values = [jnp.asarray(a) for a in arrays]
    return map_replicas(topology, on_replica, values, varying, [False])[0]


def gather_arrays(
    arrays: Sequence[Any], topology: Topology, varying: tuple[bool, ...], axis: int
) -> list[jax.Array]:
    """Returns each array's replica values concatenated along `axis`."""

    def on_replica(*local: jax.Array) -> list[Any]:
        return [
            ops.all_gather(x, axis, topology.axis_name)
            if varies
            else jnp.concatenate([x] * topology.num_replicas, axis)
            for x, varies in zip(local, varying, strict=True)
        ]

    arrays = [jnp.asarray(a) for a in arrays]
    return map_replicas(topology, on_replica, arrays, varying, [False] * len(arrays))


def combine_components(stored: jax.Array, topology: Topology, rule: str) -> jax.Array:
    """Combines a variable's components [R, ...] into one value: sum, mean or first."""

    def on_replica(x: jax.Array) -> list[Any]:
        if rule == "FIRST":
            return [ops.from_first_replica(x, topology.axis_name)]
        return [ops.all_reduce(ReduceOp[rule], x, topology.axis_name, topology.num_replicas)]

    return map_replicas(topology, on_replica, [stored], [True], [False])[0]
