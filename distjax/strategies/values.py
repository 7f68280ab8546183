"""Values as a strategy sees them: their locality and their parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax import jax_compat
from distjax.collectives.ops import is_sparse
from distjax.errors import LocalityError, describe_value, message
from distjax.placement import topology as kinds
from distjax.placement.per_replica import PerReplica, is_per_replica, require_same_topology
from distjax.placement.rows import require_not_split
from distjax.placement.topology import Locality, Topology, is_host_memory
from distjax.placement.transfer import (
    local_rows,
    require_held,
    require_no_mask,
    transfer_local_rows,
    without_alias,
)
from distjax.replica.arguments import require_callable
from distjax.replica.hooks import hooks
from distjax.strategies.contracts import ExtendedContract
from distjax.typing import PyTree
from distjax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica for which a value is built.

    Attributes:
      replica_id_in_sync_group: the replica's number, 0 to R - 1.
      num_replicas_in_sync: R.

    Source: tf.distribute.experimental.ValueContext.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1

    def __str__(self) -> str:
        return (
            f"tf.distribute.ValueContext(replica id {self.replica_id_in_sync_group},  "
            f"total replicas in sync: {self.num_replicas_in_sync})"
        )


def locality(x: PyTree) -> Locality:
    """Returns how and where `x` lives.

    Args:
      x: a variable, PerReplica, array, or anything else.

    Returns:
      A Locality; equal for values that live the same way on the same devices.

    Example:
      >>> dj.locality(np.zeros(3))
      Locality(unplaced)
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> with strategy.scope():
      ...     w, slot = dj.Variable(jnp.ones(3)), dj.Variable(jnp.zeros(3))
      >>> dj.locality(w), dj.locality(slot) == dj.locality(w)
      (Locality(mirrored on 2 devices), True)
    """
    if isinstance(x, Variable):
        return Locality(x.layout.kind, x.sharding or x.stored.require().sharding)
    if isinstance(x, PerReplica) and not x.topology.is_placed:
        return Locality(kinds.UNPLACED)
    if isinstance(x, PerReplica):
        return Locality(kinds.PER_REPLICA, x.topology.per_replica)
    if isinstance(x, jax_compat.Tracer):
        return Locality(kinds.MIRRORED)
    if not isinstance(x, jax.Array):
        return Locality(kinds.UNPLACED)
    if is_host_memory(x.sharding):
        return Locality(kinds.HOST, x.sharding)
    if not x.committed:
        return Locality(kinds.UNPLACED)
    return Locality(kinds.MIRRORED if x.is_fully_replicated else kinds.PARTITIONED, x.sharding)


def is_mirrored(topology: Topology, value: object) -> bool:
    """Returns whether `value` is an array that every replica of `topology` holds."""
    if isinstance(value, jax_compat.Tracer):
        return True
    if not isinstance(value, jax.Array):
        return False
    if jax_compat.staging():
        return True
    if value.sharding.device_set != set(topology.devices):
        return False
    return topology.mesh is None or bool(topology.model_axes) or value.is_fully_replicated


# -- taking apart -------------------------------------------------------------


def local_results(extended: ExtendedContract, value: PyTree) -> tuple[Any, ...]:
    """Returns the values of the replicas: see `Strategy.local_results`."""
    if not extended.wraps:
        return (value,)
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    if not leaves:  # None, [], {}
        return (value,)
    parts = [_leaf_results(extended, leaf) for leaf in leaves]
    if jax.tree_util.treedef_is_leaf(treedef):
        return parts[0]
    count = max(len(p) for p in parts)
    if not any(_is_distributed(extended, leaf) for leaf in leaves):
        count = len(extended.topology.local_replicas)
    rows = [p if len(p) == count else p[:1] * count for p in parts]
    return tuple(jax.tree.unflatten(treedef, [row[i] for row in rows]) for i in range(count))


def _is_distributed(extended: ExtendedContract, leaf: object) -> bool:
    return isinstance(leaf, (PerReplica, Variable)) or is_mirrored(extended.topology, leaf)


def _leaf_results(extended: ExtendedContract, leaf: PyTree) -> tuple[Any, ...]:
    if isinstance(leaf, Variable):
        return leaf.local_results()
    if isinstance(leaf, PerReplica):
        require_same_topology(leaf, extended.topology, "local_results")
        return split(extended.topology, leaf.stacked, True)
    if is_mirrored(extended.topology, leaf):
        require_not_split(leaf, extended.topology, "the value of local_results")
        return split(extended.topology, leaf, False)
    return (leaf,)


def split(topology: Topology, array: PyTree, varying: bool) -> tuple[jax.Array, ...]:
    """Returns one array [...] per replica: slices of [R, ...], or copies of one value.

    In a trace, which is the same on every process, for all R; else for this process's replicas.
    """
    count = topology.num_replicas
    is_on_devices = isinstance(array, jax.Array) and not isinstance(array, jax_compat.Tracer)
    if is_on_devices and topology.spans_processes:
        return _local_slices(topology, array) if varying else _local_copies(topology, array)
    if varying and is_on_devices:  # a user's jax.tree.map may have changed the layout
        is_on_devices = array.sharding.is_equivalent_to(topology.per_replica, array.ndim)
    if not is_on_devices or topology.mesh is None or topology.model_axes:
        return tuple(array[i] for i in range(count)) if varying else (array,) * count
    if not varying and not array.is_fully_replicated:  # one value, however it is laid out
        return (array,) * count
    shards = {s.device: s.data for s in jax_compat.shards_of(array)}
    local = [shards[d] for d in topology.devices if d in shards]
    if len(local) != count:
        return (array,) * count
    return tuple(x[0] for x in local) if varying else tuple(local)


def _local_slices(topology: Topology, stacked: jax.Array) -> tuple[jax.Array, ...]:
    rows = local_rows(stacked, topology)
    if len(rows) == len(topology.local_replicas):
        return tuple(rows.values())
    raise LocalityError(
        message(
            "a value per replica needs to lie with its replicas to be taken apart",
            got=f"an array {list(stacked.shape)} at {stacked.sharding}, of which this process "
            f"holds the values of replicas {list(rows)}",
            why="the others are in other processes, and taking apart moves nothing between them",
            fix="x = strategy.per_replica(x.stacked) on every process, which moves each row to "
            "its replica",
        )
    )


def _local_copies(topology: Topology, array: jax.Array) -> tuple[jax.Array, ...]:
    if topology.model_axes or not array.is_fully_replicated:  # one value, however it is laid out
        return (array,) * len(topology.local_replicas)
    shards = {shard.device: shard.data for shard in jax_compat.shards_of(array)}
    return tuple(shards[device] for device in topology.local_devices)


# -- making -------------------------------------------------------------------


def values_from_function(extended: ExtendedContract, fn: Callable[[Any], Any]) -> Any:
    """Returns a PerReplica of the values of ``fn`` for each replica."""
    require_callable(fn, "distribute_values_from_function")
    if not extended.wraps:
        value = fn(ValueContext())
        hooks().on_lone_value(value)
        return value
    topology = extended.topology
    flat: list[tuple[list[Any], Any]] = []
    for replica in topology.local_replicas:
        value = fn(ValueContext(replica, topology.num_replicas))
        leaves, treedef = jax.tree.flatten(value, is_leaf=is_sparse)
        flat.append(([*map(without_alias, leaves)], treedef))
    first = topology.local_replicas[0]
    for replica, (_, treedef) in zip(topology.local_replicas, flat, strict=True):
        if treedef != flat[0][1]:
            raise LocalityError(
                _values_text(
                    f"a tree {treedef} on replica {replica}, {flat[0][1]} on replica {first}"
                )
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(flat[0][1], [_stack(topology, column) for column in columns])


def _stack(topology: Topology, column: Sequence[Any]) -> PerReplica:
    for value in column:
        is_known = isinstance(value, (jax.Array, np.ndarray, np.generic, int, float, complex))
        if not is_known or getattr(value, "dtype", None) == np.dtype(object):
            raise LocalityError(_values_text(describe_value(value)))
        require_no_mask(value, "distribute_values_from_function")
        require_held(value, "distribute_values_from_function")
    shapes = {np.shape(value) for value in column}
    if len(shapes) > 1:
        raise LocalityError(_values_text(f"shapes {sorted(shapes)}"))
    if any(isinstance(value, jax.Array) for value in column):
        stacked = jnp.stack([jnp.asarray(off_device(value)) for value in column])
    else:
        stacked = np.stack(list(map(_on_host, column)))
    return PerReplica(transfer_local_rows(stacked, topology), topology)


def _on_host(value: PyTree) -> Any:
    """Returns a host array or number as numpy; numbers in the dtype that JAX gives them."""
    if hasattr(value, "dtype"):
        return np.asarray(value)
    kind = next(kind for kind in (bool, int, float, complex) if isinstance(value, kind))
    dtype = jax.dtypes.canonicalize_dtype(kind)
    try:
        return np.asarray(value, dtype)
    except OverflowError as error:
        raise OverflowError(
            message(
                f"distribute_values_from_function needs numbers that {dtype} holds",
                got=describe_value(value),
                why="it would wrap around on the devices",
                fix="a float; 64 bits need jax_enable_x64",
            )
        ) from error


def off_device(value: PyTree) -> Any:
    """Returns an array that can be combined with arrays on other devices."""
    if isinstance(value, jax.Array) and not jax_compat.is_key_dtype(value.dtype):
        return value if isinstance(value, jax_compat.Tracer) else np.asarray(value)
    return value


def _values_text(got: str) -> str:
    return message(
        "distribute_values_from_function needs arrays or numbers of one tree and one shape from "
        "all replicas",
        got=got,
        why="the values are slices of one array [R, ...]: sparse, ragged and Python-object values "
        "cannot be",
        fix="pad the values to one shape, and pass Python objects to run as they are",
    )
