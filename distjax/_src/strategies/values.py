"""Values as a strategy sees them: how they live, taken apart, and built from parts.

Arrays [R, ...] become a `PerReplica` (`per_replica`), and the first row one value (`first`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax._src import hooks, jax_compat
from distjax._src.collectives.ops import is_sparse
from distjax._src.context import ExtendedLike, frames
from distjax._src.placement import (
    Locality,
    PerReplica,
    Topology,
    copied,
    holds_rows,
    is_host_memory,
    is_per_replica,
    is_split_over_replicas,
    replica_axis,
    require_held,
    require_no_mask,
    require_not_split,
    require_same_topology,
    take_apart,
    transfer,
    transfer_local_rows,
    without_alias,
)
from distjax._src.placement import topology as kinds
from distjax._src.replica.arguments import is_array, require_callable
from distjax._src.replica.global_value import place_output
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable, read_components
from distjax.errors import LocalityError, describe_value, message


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
    return not is_split_over_replicas(value, topology)


# -- taking apart -------------------------------------------------------------


def local_results(extended: ExtendedLike, value: PyTree) -> tuple[Any, ...]:
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


def _is_distributed(extended: ExtendedLike, leaf: object) -> bool:
    return isinstance(leaf, (PerReplica, Variable)) or is_mirrored(extended.topology, leaf)


def _leaf_results(extended: ExtendedLike, leaf: PyTree) -> tuple[Any, ...]:
    if isinstance(leaf, PerReplica):
        require_same_topology(leaf, extended.topology, "local_results")
    elif is_mirrored(extended.topology, leaf):
        require_not_split(leaf, extended.topology, "the value of local_results")
    return parts_of(extended.topology, leaf)


def parts_of(topology: Topology, leaf: PyTree) -> tuple[Any, ...]:
    """Returns the value of each replica; a 1-tuple for what is not on the replicas."""
    if isinstance(leaf, Variable):
        return leaf.local_results()
    if isinstance(leaf, PerReplica):
        return take_apart(leaf.stacked, topology, varying=True)
    is_whole = is_mirrored(topology, leaf)
    return take_apart(leaf, topology, varying=False) if is_whole else (leaf,)


# -- making -------------------------------------------------------------------


def values_from_function(extended: ExtendedLike, fn: Callable[[Any], Any]) -> Any:
    """Returns a PerReplica of the values of ``fn`` for each replica."""
    require_callable(fn, "distribute_values_from_function")
    if not extended.wraps:
        value = fn(ValueContext())
        hooks.tell(hooks.on_lone_value, value)
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


# -- rows ----------------------------------------------------------------------


def stack_rows(extended: ExtendedLike, tree: PyTree) -> Any:
    """Returns a tree of [R, ...] arrays as PerReplica: see `Strategy.per_replica`."""
    topology = extended.topology
    is_list = isinstance(tree, (tuple, list)) and len(tree) == topology.num_replicas
    fix = "strategy.per_replica(jnp.stack(values)) for a list of R values" if is_list else _AS_IT_IS

    def stack(path: tuple[Any, ...], leaf: PyTree) -> Any:
        where = f"per_replica: the value{jax.tree_util.keystr(path)}"
        if isinstance(leaf, PerReplica):
            require_same_topology(leaf, topology, where)
            return leaf
        if not is_array(leaf):
            return leaf
        require_rows(leaf, where, topology, fix)
        return place_rows(extended, leaf)

    _require_arrays(tree)
    return jax.tree_util.tree_map_with_path(stack, tree, is_leaf=is_per_replica)


def _require_arrays(tree: PyTree) -> None:
    leaves = jax.tree.leaves(tree, is_leaf=is_per_replica)
    if not leaves or any(is_array(leaf) or is_per_replica(leaf) for leaf in leaves):
        return
    raise LocalityError(
        "per_replica needs arrays [R, ...], a row per replica",
        got=f"a tree without any array: {describe_value(tree)}",
        why="a list of R numbers is R values, which all replicas share",
        fix="strategy.per_replica(np.array([1.0, 2.0]))",
    )


def place_rows(extended: ExtendedLike, rows: PyTree) -> Any:
    """Returns [R, ...] as a PerReplica; the single row where the strategy never wraps."""
    topology = extended.topology
    if not extended.wraps:
        row = _place(without_alias(rows[0]), topology)
        hooks.tell(hooks.on_lone_value, row)
        return row
    if isinstance(rows, jax_compat.Tracer):
        return place_output(PerReplica(rows, topology), topology)
    return PerReplica(_copied_to(rows, topology), topology)


def _copied_to(rows: PyTree, topology: Topology) -> jax.Array:
    """Returns [R, ...] on the replicas in memory of its own, since a step may donate it."""
    if not isinstance(rows, jax.Array):
        return transfer(without_alias(rows), topology.per_replica)
    if rows.is_fully_addressable:
        return copied(rows, topology.per_replica)
    placed = transfer(rows, topology.per_replica)
    return jnp.copy(placed) if placed.sharding == rows.sharding else placed


_AS_IT_IS = "pass trees without that dimension to run as they are"


def require_rows(leaf: PyTree, where: str, topology: Topology, fix: str = _AS_IT_IS) -> None:
    """Raises a LocalityError unless `leaf` has a leading dimension of R."""
    require_held(leaf, where)
    if leaf.ndim and leaf.shape[0] == topology.num_replicas:
        return
    raise LocalityError(
        f"{where} needs a leading dimension of {topology.num_replicas}, a row per replica",
        got=describe_value(leaf),
        why="row r is the value of replica r, as jax_utils.replicate and pmap stack them",
        fix=fix,
    )


def take_first(extended: ExtendedLike, tree: PyTree) -> Any:
    """Returns the first replica's values on every replica: see `Strategy.first`."""
    topology = extended.topology

    def take(path: tuple[Any, ...], leaf: PyTree) -> Any:
        where = f"first: the value{jax.tree_util.keystr(path)}"
        if isinstance(leaf, Variable):
            return _first_of_variable(leaf, topology)
        if isinstance(leaf, PerReplica):
            require_same_topology(leaf, topology, where)
            return _place(leaf.stacked[0], topology)
        if not holds_rows(leaf, topology):
            return leaf
        if isinstance(leaf, jax_compat.Tracer) and replica_axis(leaf, topology) != 0:
            require_not_split(leaf, topology, where)  # there is no first row
        require_rows(leaf, where, topology)
        return _place(leaf[0], topology)

    return jax.tree_util.tree_map_with_path(take, tree, is_leaf=is_per_replica)


def _first_of_variable(variable: Variable, topology: Topology) -> Any:
    if not variable.policy.stacked or frames.current().is_replica:
        return variable.value
    return _place(read_components(variable)[0], topology)


def _place(row: PyTree, topology: Topology) -> Any:
    if isinstance(row, jax_compat.Tracer):
        return place_output(row, topology)
    return transfer(row, topology.mirrored)
