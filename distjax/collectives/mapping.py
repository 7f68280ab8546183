"""Mapping a function over the replicas of a topology.

The one place where a replica-view function becomes global-view code: under
`shard_map` where replicas have devices of their own, under `vmap` where they
share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from distjax.placement.topology import Topology


def map_replicas(
    topology: Topology,
    fn: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    args_differ: Sequence[bool],
    outs_differ: Sequence[bool] | bool,
) -> list[Any]:
    """Runs ``fn`` once per replica, on one view of global arrays.

    Args:
      topology: the R replicas.
      fn: takes each argument as one replica sees it, returns a sequence.
      args: global arrays, stacked [R, ...] where they differ.
      args_differ: per argument, whether replicas see different values.
      outs_differ: per output, or for all, whether replicas produce different
        values. An output said to be equal is taken from replica 0 unchecked.

    Returns:
      Global arrays, stacked [R, ...] where outs_differ.
    """
    if topology.mesh is None:
        return _map_on_one_device(topology, fn, args, args_differ, outs_differ)

    def on_blocks(*blocks: Any) -> list[Any]:
        local = [lax.squeeze(b, (0,)) if t else b for b, t in zip(blocks, args_differ, strict=True)]
        outs = list(fn(*local))
        flags = _per_output(outs_differ, len(outs))
        return [lax.expand_dims(o, (0,)) if t else o for o, t in zip(outs, flags, strict=True)]

    def spec(differs: bool) -> PartitionSpec:
        return PartitionSpec(topology.axis_name) if differs else PartitionSpec()

    mapped = jax.shard_map(
        on_blocks,
        mesh=topology.mesh,
        in_specs=tuple(spec(t) for t in args_differ),
        out_specs=spec(outs_differ)
        if isinstance(outs_differ, bool)
        else [spec(t) for t in outs_differ],
        axis_names={topology.axis_name},
        check_vma=False,
    )
    return mapped(*args)


def _per_output(outs_differ: Sequence[bool] | bool, count: int) -> Sequence[bool]:
    return [outs_differ] * count if isinstance(outs_differ, bool) else outs_differ


def _map_on_one_device(
    topology: Topology,
    fn: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    args_differ: Sequence[bool],
    outs_differ: Sequence[bool] | bool,
) -> list[Any]:
    mapped = jax.vmap(
        lambda *local: list(fn(*local)),
        in_axes=tuple(0 if t else None for t in args_differ),
        out_axes=0,
        axis_name=topology.axis_name,
        axis_size=topology.num_replicas,
    )
    outs = mapped(*args)
    flags = _per_output(outs_differ, len(outs))
    return [o if t else o[0] for o, t in zip(outs, flags, strict=True)]
