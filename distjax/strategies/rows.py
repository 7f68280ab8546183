"""Arrays [R, ...] with a row per replica: makes a PerReplica, takes the first row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from distjax import jax_compat
from distjax.context import frames
from distjax.context.contracts import ExtendedLike
from distjax.errors import LocalityError, describe_value, message
from distjax.placement.per_replica import PerReplica, is_per_replica, require_same_topology
from distjax.placement.rows import holds_rows, replica_axis, require_not_split
from distjax.placement.topology import Topology
from distjax.placement.transfer import copied, require_held, transfer, without_alias
from distjax.replica.arguments import is_array
from distjax.replica.global_value import place_output
from distjax.replica.hooks import hooks
from distjax.typing import PyTree
from distjax.variables.access import read_components
from distjax.variables.variable import Variable


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
        message(
            "per_replica needs arrays [R, ...], a row per replica",
            got=f"a tree without any array: {describe_value(tree)}",
            why="a list of R numbers is R values, which all replicas share",
            fix="strategy.per_replica(np.array([1.0, 2.0]))",
        )
    )


def place_rows(extended: ExtendedLike, rows: PyTree) -> Any:
    """Returns [R, ...] as a PerReplica; the single row where the strategy never wraps."""
    topology = extended.topology
    if not extended.wraps:
        row = _place(without_alias(rows[0]), topology)
        hooks().on_lone_value(row)
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
        message(
            f"{where} needs a leading dimension of {topology.num_replicas}, a row per replica",
            got=describe_value(leaf),
            why="row r is the value of replica r, as jax_utils.replicate and pmap stack them",
            fix=fix,
        )
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
