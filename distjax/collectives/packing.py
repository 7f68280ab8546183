"""Sums over the replicas, in the replica view: packed, compressed, or in two levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distjax.collectives.communication import CommunicationOptions
from distjax.placement.topology import Topology


def sum_over_replicas(
    arrays: Sequence[jax.Array], topology: Topology, options: CommunicationOptions
) -> list[jax.Array]:
    """Returns each array summed over the replicas, as specified by `options`.

    Args:
      arrays: one replica's values.
      topology: the replicas.
      options: packing, compression, levels.

    Cost: one collective per pack (per array without packing); two if compressed (an
      all-to-all and an all-gather, each of half the bytes); three in two levels, of which the one
      across hosts is two if compressed.
    """
    sum_one = _make_sum(topology, options)
    if options.bytes_per_pack == 0:
        return [sum_one(x) for x in arrays]
    summed: dict[int, jax.Array] = {}
    for pack in packs(arrays, options.bytes_per_pack):
        joined = sum_one(jnp.concatenate([arrays[i].reshape(-1) for i in pack]))
        start = 0
        for i in pack:
            summed[i] = joined[start : start + arrays[i].size].reshape(arrays[i].shape)
            start += arrays[i].size
    return [summed[i] for i in range(len(arrays))]


def packs(arrays: Sequence[jax.Array], bytes_per_pack: int) -> list[list[int]]:
    """Groups arrays by dtype into packs of up to `bytes_per_pack`; returns indices.

    An array larger than that gets a pack of its own.
    """
    made: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(arrays):
        size = x.size * x.dtype.itemsize
        pack, used = open_packs.get(x.dtype, ([], bytes_per_pack + 1))
        if used + size > bytes_per_pack:
            pack, used = [], 0
            made.append(pack)
        pack.append(i)
        open_packs[x.dtype] = (pack, used + size)
    return made


def _make_sum(
    topology: Topology, options: CommunicationOptions
) -> Callable[[jax.Array], jax.Array]:
    axis, num_replicas, inside = topology.axis_name, topology.num_replicas, options.devices_per_host
    # Groups of replicas require replicas with devices of their own.
    has_levels = topology.mesh is not None and 1 < inside < num_replicas

    def sum_one(x: jax.Array) -> jax.Array:
        is_wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 2
        is_compressed = options.compress is not None and is_wide
        if has_levels and x.size:
            return _two_level_sum(x, axis, num_replicas, inside, is_compressed)
        if is_compressed and x.size:
            return _sum_compressed(x, axis, num_replicas)
        return lax.psum(x, axis)

    return sum_one


def _in_chunks(x: jax.Array, count: int) -> jax.Array:
    """Returns the elements of `x` as [count, n], zero-padded at the end."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _sum_compressed(
    x: jax.Array, axis: str, count: int, groups: Sequence[Sequence[int]] | None = None
) -> jax.Array:
    """Returns the sum over `count` replicas: all of them, or those of a group.

    Replica r receives everyone's chunk r, sums it in float32 and shares it.
    """
    chunks = _in_chunks(x, count).astype(jnp.bfloat16)
    received = lax.all_to_all(chunks, axis, 0, 0, axis_index_groups=groups)
    own_chunk = jnp.sum(received.astype(jnp.float32), axis=0).astype(jnp.bfloat16)
    flat = lax.all_gather(own_chunk, axis, axis_index_groups=groups, tiled=True)
    return flat[: x.size].reshape(x.shape).astype(x.dtype)


def _two_level_sum(
    x: jax.Array, axis: str, num_replicas: int, inside: int, is_compressed: bool
) -> jax.Array:
    """Returns the sum: reduce-scatter within hosts, all-reduce across, all-gather within.

    Compressed is what travels across hosts, where links are slow.
    """
    hosts = range(num_replicas // inside)
    neighbors = [[h * inside + d for d in range(inside)] for h in hosts]
    across = [[h * inside + d for h in hosts] for d in range(inside)]
    part = lax.psum_scatter(
        _in_chunks(x, inside), axis, scatter_dimension=0, axis_index_groups=neighbors
    )
    if is_compressed:
        part = _sum_compressed(part, axis, len(hosts), across)
    else:
        part = lax.psum(part, axis, axis_index_groups=across)
    flat = lax.all_gather(part, axis, axis_index_groups=neighbors, tiled=True)
    return flat[: x.size].reshape(x.shape)
