"""Transfers to devices: how a host value becomes an array over several processes.

When `jax.device_put` places a host value on devices of several processes, it implicitly runs a
collective that gathers the value from all of them and compares, which hangs on a second thread,
rejects NaNs and keys, and costs a round trip. Here each process fills its own devices and
nothing is exchanged; other code checks that the value is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from distjax._src import jax_compat
from distjax._src.placement.topology import Topology
from distjax._src.traces import is_struct, struct
from distjax._src.typing import PyTree
from distjax._src.user_mesh import ignores_user_mesh
from distjax.errors import LocalityError, describe_value, message

_config: Any = jax.config  # type checkers do not know its options


def transfer(value: PyTree, sharding: Sharding | None) -> Any:
    """Returns `value`, which must be the same on every process, placed at `sharding`.

    It is on the host, on this process's devices, or over several processes, which all of them move
    in one program; a struct may stand for it. Without a sharding it goes to JAX's default device.
    Of a host value nothing is sent between processes.
    """
    if is_struct(value):
        return value.update(sharding=sharding)
    if sharding is not None and jax_compat.only_compiles(sharding.device_set):
        return _described(value, sharding)
    if sharding is None or sharding.is_fully_addressable:
        return _put([value], sharding)[0]
    if _is_global(value):
        return jax.device_put(value, sharding)
    host = _on_host(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def _described(value: PyTree, sharding: Sharding) -> Any:
    """Returns what stands for `value` on devices that only compile; traced values are placed."""
    if isinstance(value, jax_compat.Tracer) or jax_compat.staging():
        return jax.device_put(value, sharding)
    return struct(np.shape(value), jax.typeof(value).dtype, sharding)


def copied(array: jax.Array, sharding: Sharding | None = None) -> jax.Array:
    """Returns a copy of this process's array in memory of its own, by default where it is.

    Unlike `jnp.copy` it compiles nothing.
    """
    return jax.device_put(array, sharding or array.sharding, may_alias=False)


def is_elsewhere(value: object, devices: Collection[jax.Device]) -> bool:
    """Returns whether `value` is an array, or a struct for one, committed to other devices."""
    if is_struct(value):
        return isinstance(value.sharding, Sharding) and value.sharding.device_set != devices
    if not isinstance(value, jax.Array) or isinstance(value, jax_compat.Tracer):
        return False
    return value.committed and value.sharding.device_set != devices


def transfer_each(values: list[Any], sharding: Sharding | None) -> list[Any]:
    """Places `values` as `transfer` does; within one process, all in a single transfer."""
    if sharding is not None and (
        not sharding.is_fully_addressable or jax_compat.only_compiles(sharding.device_set)
    ):
        return [transfer(value, sharding) for value in values]
    return _put(values, sharding)


def _put(values: list[Any], sharding: Sharding | None) -> list[Any]:
    """Places `values` on devices of this process, or as a trace says."""
    is_guarded = _config.jax_transfer_guard_host_to_device
    if sharding is None or is_guarded or any(type(x) is not np.ndarray for x in values):
        return jax.device_put(values, sharding)
    if jax_compat.staging():
        return jax.device_put(values, sharding)
    # The same call of XLA, without most of the Python code before it; implicit for a guard.
    return [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in values]


def transfer_local_rows(rows: PyTree, topology: Topology, axis: int = 0) -> Any:
    """Builds an array [R, ...] from the rows [L, ...] that each process has for its replicas.

    They are in the order of `topology.local_replicas`; `axis` of both arrays runs over the
    replicas.
    """
    sharding = topology.split_along(axis)
    if jax_compat.only_compiles(topology.devices):
        return transfer(rows, sharding)
    if not topology.spans_processes:
        return jax.device_put(rows, sharding)
    host, place = _on_host(rows), {r: i for i, r in enumerate(topology.local_replicas)}

    def of_one_replica(index: tuple[slice, ...] | None) -> Any:
        assert index is not None, "JAX says which part"
        own = place[index[axis].start or 0]  # `start` is None for R = 1
        return host[(slice(None),) * axis + (slice(own, own + 1),)]

    shape = [*host.shape]
    shape[axis] = topology.num_replicas
    return jax.make_array_from_callback(tuple(shape), sharding, of_one_replica)


def local_rows(stacked: jax.Array, topology: Topology) -> dict[int, Any]:
    """Returns the rows of an array [R, ...] that this process holds, by replica.

    Only whole rows are returned, each as an array on one of this process's devices; nothing
    moves between devices.
    """
    rows: dict[int, Any] = {}
    for shard in jax_compat.shards_of(stacked):
        first, *rest = shard.index
        sizes = zip(rest, stacked.shape[1:])  # noqa: B905 - of keys, `rest` goes on into their data
        is_whole = all(_covers(s, size) for s, size in sizes)
        for offset in range(shard.data.shape[0]) if is_whole else ():
            rows.setdefault((first.start or 0) + offset, shard.data[offset])
    return {replica: rows[replica] for replica in topology.local_replicas if replica in rows}


@ignores_user_mesh
def take_apart(array: PyTree, topology: Topology, *, varying: bool) -> tuple[jax.Array, ...]:
    """Returns one array [...] per replica: slices of [R, ...], or copies of one value.

    In a trace, which is the same on every process, for all R; else for this process's replicas.
    """
    count, is_traced = topology.num_replicas, isinstance(array, jax_compat.Tracer)
    if is_traced or not isinstance(array, jax.Array) or topology.mesh is None:
        return tuple(array[i] for i in range(count)) if varying else (array,) * count
    if varying:
        return _local_slices(array, topology)
    if topology.model_axes or not array.is_fully_replicated:  # one value, however it is laid out
        return (array,) * len(topology.local_replicas)
    shards = {shard.device: shard.data for shard in jax_compat.shards_of(array)}
    return tuple(shards[device] for device in topology.local_devices)


def _local_slices(stacked: jax.Array, topology: Topology) -> tuple[jax.Array, ...]:
    is_here = not topology.spans_processes
    rows = {} if is_here and topology.model_axes else local_rows(stacked, topology)
    if len(rows) == len(topology.local_replicas):
        return tuple(rows.values())
    if is_here:  # a user's jax.tree.map may have changed the layout
        return tuple(stacked[i] for i in range(topology.num_replicas))
    raise LocalityError(
        "a value per replica needs to lie with its replicas to be taken apart",
        got=f"an array {list(stacked.shape)} at {stacked.sharding}, of which this process "
        f"holds the values of replicas {list(rows)}",
        why="the others are in other processes, and taking apart moves nothing between them",
        fix="x = strategy.per_replica(x.stacked) on every process, which moves each row to "
        "its replica",
    )


def require_wholly_here(array: jax.Array | np.ndarray, name: str) -> None:
    """Raises a LocalityError if part of the array is held only by other processes."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return
    raise LocalityError(
        f"{name} needs to be wholly on this process to be read by the host",
        got=f"a part of {array.dtype}{list(array.shape)}: {array.sharding}",
        why="the rest is on devices of other processes, and a part would be taken for the whole",
        fix="read it on every process: strategy.broadcast(x), or reduce it in the "
        "step; save all of it by dj.checkpoint.Checkpointer",
    )


def _covers(part: slice, size: int) -> bool:
    return (part.start or 0) == 0 and (part.stop is None or part.stop == size)


def _on_host(value: PyTree) -> Any:
    """Returns `value` as numpy; PRNG keys stay as they are, since numpy has no keys."""
    is_key = isinstance(value, jax.Array) and jax_compat.is_key_dtype(value.dtype)
    return value if is_key else np.asarray(value)


def _is_global(value: object) -> bool:
    """Returns whether `value` is traced, or spans several processes."""
    if isinstance(value, jax_compat.Tracer):
        return True
    return isinstance(value, jax.Array) and not value.is_fully_addressable


# -- host arrays of the user ---------------------------------------------------
# They are copied, since the user may refill them, and checked: they may have no mask, and no
# integers that wrap around where JAX makes 32 bits of 64.


def without_alias(value: PyTree) -> Any:
    """Returns a host array copied, before the caller can refill it; anything else as it is.

    On CPU an array of JAX may share its memory, or copy it later (`jnp.array` does so too).
    """
    return value.copy() if isinstance(value, np.ndarray) else value


def require_no_mask(value: PyTree, what: str) -> None:
    """Raises a ValueError for a masked array of numpy, of which `np.asarray` drops the mask."""
    if not isinstance(value, np.ma.MaskedArray):
        return
    raise ValueError(
        message(
            f"{what} needs an array without a mask",
            got=describe_value(value),
            why="JAX has no masked arrays: the values under the mask would count",
            fix="x.filled(0), or x.data and x.mask as two arrays",
        )
    )


def is_narrowed(value: PyTree) -> bool:
    """Returns whether `value` has host integers of a dtype that JAX makes narrower."""
    if not isinstance(value, _HOST) or value.dtype.kind not in "iu" or value.dtype.itemsize < 8:
        return False
    return jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype


def wraps_around(value: PyTree) -> str | None:
    """Returns the least and largest integer as text if JAX cannot hold them; None if it can.

    Only host arrays and numbers of a dtype that JAX narrows (64 bits, without
    `jax_enable_x64`) are read.

    Cost: 0.24 ms for a million integers; 0.2 microseconds for any other value.
    """
    if not is_narrowed(value) or not value.size:
        return None
    narrowed = jax.dtypes.canonicalize_dtype(value.dtype)
    info, least, largest = np.iinfo(narrowed), int(value.min()), int(value.max())
    return None if info.min <= least and largest <= info.max else f"{least} to {largest}"


def require_held(value: PyTree, what: str) -> None:
    """Raises an OverflowError for a host array of integers that JAX cannot hold."""
    found = wraps_around(value)
    if found is not None:
        narrowed = jax.dtypes.canonicalize_dtype(value.dtype)
        raise OverflowError(
            message(
                f"{what} needs integers that {narrowed} holds",
                got=f"{describe_value(value)} with values from {found}",
                why=f"JAX makes {narrowed} of {value.dtype}, and they would wrap around",
                fix=HELD_FIX,
            )
        )


#: How integers of more than 32 bits are passed.
HELD_FIX = (
    "x.astype(np.float32), or two arrays: (x >> 31).astype(np.int32) and "
    "(x & 0x7FFFFFFF).astype(np.int32); 64 bits need jax.config.update('jax_enable_x64', True)"
)

_HOST: Any = (np.ndarray, np.generic)
