"""The doors to devices: how a value of the host becomes an array of several processes.

`jax.device_put` of a host value onto devices of several processes is a collective behind the
user's back: it gathers the value from all of them and compares, which hangs on a second thread,
refuses NaN and keys, and costs a round trip. Here each process gives its own devices what they
hold and nothing is exchanged. That the value is the same everywhere is agreed elsewhere.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from distjax import jax_compat
from distjax.errors import LocalityError, message
from distjax.placement.topology import Topology
from distjax.typing import PyTree


def transfer(value: PyTree, sharding: Sharding | None) -> Any:
    """Returns one array, which is the same on every process, at `sharding`.

    Args:
      value: an array or number of the host or of this process's devices, which every process
        has; or an array of several processes, which all of them move by one program.
      sharding: where; None: JAX's default device.

    Cost: the bytes that this process's devices hold; between processes nothing for a value
      of the host.
    """
    if sharding is None or sharding.is_fully_addressable or _is_global(value):
        return jax.device_put(value, sharding)
    host = _on_host(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def transfer_each(values: list[Any], sharding: Sharding | None) -> list[Any]:
    """Returns `values` at `sharding` as `transfer` does, in one transfer within one process."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return [transfer(value, sharding) for value in values]


def transfer_local_rows(rows: PyTree, topology: Topology, axis: int = 0) -> Any:
    """Returns the array [R, ...] of which each process gives the rows of its own replicas.

    Args:
      rows: array [L, ...], a row for each replica in `topology.local_replicas`, in order.
      topology: the replicas.
      axis: which axis of `rows`, and of the array, runs over the replicas.
    """
    sharding = topology.split_along(axis)
    if not topology.spans_processes:
        return jax.device_put(rows, sharding)
    host, place = _on_host(rows), {r: i for i, r in enumerate(topology.local_replicas)}

    def of_one_replica(index: tuple[slice, ...] | None) -> Any:
        assert index is not None, "JAX says which part"
        own = place[index[axis].start or 0]  # R = 1: slice(None)
        return host[(slice(None),) * axis + (slice(own, own + 1),)]

    shape = [*host.shape]
    shape[axis] = topology.num_replicas
    return jax.make_array_from_callback(tuple(shape), sharding, of_one_replica)


def local_rows(stacked: jax.Array, topology: Topology) -> dict[int, Any]:
    """Returns the rows of an array [R, ...] that this process holds whole, by replica.

    Nothing is computed or moved: a row is an array on one of this process's devices.
    """
    rows: dict[int, Any] = {}
    for shard in stacked.addressable_shards:
        first, *rest = shard.index
        is_whole = all(_covers(s, size) for s, size in zip(rest, stacked.shape[1:], strict=True))
        for offset in range(shard.data.shape[0]) if is_whole else ():
            rows.setdefault((first.start or 0) + offset, shard.data[offset])
    return {replica: rows[replica] for replica in topology.local_replicas if replica in rows}


def require_wholly_here(array: jax.Array | np.ndarray, name: str) -> None:
    """Raises a LocalityError for an array of which other processes hold a part.

    Args:
      array: the array.
      name: the user's name of it.
    """
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return
    raise LocalityError(
        message(
            f"{name} needs to be wholly on this process to be read by the host",
            got=f"a part of {array.dtype}{list(array.shape)}: {array.sharding}",
            why="the rest is on devices of other processes, and a part would pass for the whole",
            fix="read it on every process: strategy.extended.broadcast_to(x), or reduce it in the "
            "step; save all of it by dj.checkpoint.Checkpointer",
        )
    )


def _covers(part: slice, size: int) -> bool:
    return (part.start or 0) == 0 and (part.stop is None or part.stop == size)


def _on_host(value: PyTree) -> Any:
    """Returns `value` as numpy, PRNG keys as they are: parts of it go to several devices."""
    is_key = isinstance(value, jax.Array) and jax_compat.is_key_dtype(value.dtype)
    return value if is_key else np.asarray(value)


def _is_global(value: object) -> bool:
    """Returns whether `value` is traced, or lies on devices of several processes."""
    if isinstance(value, jax_compat.Tracer):
        return True
    return isinstance(value, jax.Array) and not value.is_fully_addressable
