"""Mapping a function over the replicas of a topology.

The only place where a replica-view function becomes global-view code: under `shard_map`
if the replicas have devices of their own, under `vmap` if they share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from distjax import jax_compat
from distjax.collectives.wide_reductions import needs_wide_reductions, widen_reductions
from distjax.placement.topology import Topology
from distjax.staged_call import run_compiled

#: The name that the function of each map has in traces.
_NAME = "distjax_replicas"


def map_replicas(
    topology: Topology,
    fn: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    args_varying: Sequence[bool],
    outs_varying: Sequence[bool] | bool,
) -> list[Any]:
    """Runs ``fn`` once per replica on global arrays.

    Args:
      topology: the R replicas.
      fn: takes each argument as one replica sees it, returns a sequence.
      args: global arrays, stacked [R, ...] if they vary.
      args_varying: per argument, whether replicas see different values.
      outs_varying: per output, or for all, whether replicas produce different
        values. Outputs declared equal are taken from replica 0 unchecked.

    Returns:
      Global arrays, stacked [R, ...] if they vary.
    """
    if topology.mesh is None:
        return _map_on_one_device(topology, fn, args, args_varying, outs_varying)

    if needs_wide_reductions(topology):
        fn, args = widen_reductions(fn, args, args_varying)

    def on_blocks(*blocks: jax.Array) -> list[Any]:
        local = [
            lax.squeeze(block, (0,)) if varies else block
            for block, varies in zip(blocks, args_varying, strict=True)
        ]
        outs = list(fn(*local))
        flags = _per_output(outs_varying, len(outs))
        return [
            lax.expand_dims(out, (0,)) if varies else out
            for out, varies in zip(outs, flags, strict=True)
        ]

    on_blocks.__name__ = on_blocks.__qualname__ = _NAME

    def spec(varying: bool) -> PartitionSpec:
        return PartitionSpec(topology.axis_name) if varying else PartitionSpec()

    mapped = jax.shard_map(
        on_blocks,
        mesh=topology.mesh,
        in_specs=tuple(map(spec, args_varying)),
        out_specs=spec(outs_varying)
        if isinstance(outs_varying, bool)
        else list(map(spec, outs_varying)),
        axis_names={topology.axis_name},
        check_vma=False,
    )
    if topology.model_axes and not jax_compat.staging():
        return run_compiled(mapped, args)
    return mapped(*args)


def is_replica_map(eqn: jax_compat.JaxprEqn) -> bool:
    """Returns whether an equation is a `shard_map` of `map_replicas`, not one of the user."""
    if eqn.primitive.name != "shard_map":
        return False
    code, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    return code.debug_info.func_name == _NAME


def _per_output(outs_varying: Sequence[bool] | bool, count: int) -> Sequence[bool]:
    return [outs_varying] * count if isinstance(outs_varying, bool) else outs_varying


def _map_on_one_device(
    topology: Topology,
    fn: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    args_varying: Sequence[bool],
    outs_varying: Sequence[bool] | bool,
) -> list[Any]:
    mapped = jax.vmap(
        lambda *local: list(fn(*local)),
        in_axes=tuple(0 if varies else None for varies in args_varying),
        out_axes=0,
        axis_name=topology.axis_name,
        axis_size=topology.num_replicas,
    )
    outs = mapped(*args)
    flags = _per_output(outs_varying, len(outs))
    return [out if varies else out[0] for out, varies in zip(outs, flags, strict=True)]
