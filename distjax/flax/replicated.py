"""Converts to and from trees with the leading axis of `flax.jax_utils.replicate`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax import jax_compat
from distjax.context import frames
from distjax.context.contracts import ExtendedLike
from distjax.errors import ContextError, message
from distjax.placement.per_replica import PerReplica, is_per_replica, require_same_topology
from distjax.placement.transfer import transfer
from distjax.replica.arguments import is_array
from distjax.strategies.rows import place_rows, require_rows
from distjax.typing import PyTree


def from_replicated(tree: PyTree, compare: bool = False) -> Any:
    """Converts a tree of [R, ...] arrays to the form that `run` takes.

    Every array becomes a PerReplica, even if its rows are equal: array values never decide
    how a step is compiled. Parameters, whose rows are equal, are better passed through
    `Strategy.first` (or as they were before `replicate`), so that distjax can prove them equal.

    Args:
      tree: as returned by `jax_utils.replicate` and functions under `jax.pmap`.
      compare: whether a leaf whose R rows are equal bit for bit becomes one mirrored
        array [...].

    Locality: unplaced in; T out (M where the rows compare equal). Context: cross-replica.
      Cost: no collective; with `compare`, every leaf is compared on the host.

    Raises:
      ContextError: no strategy is active.
      LocalityError: a leaf whose leading dimension is not R.

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> with strategy.scope():
      ...     tree = dj.flax.from_replicated(
      ...         {"w": np.ones((2, 3)), "mean": np.arange(2.0)}, compare=True)
      >>> tree["w"].shape, type(tree["mean"]).__name__
      ((3,), 'PerReplica')

    Source: flax.jax_utils.
    """
    extended = _require_scope("from_replicated")
    topology = extended.topology

    def take_in(path: tuple[Any, ...], leaf: PyTree) -> Any:
        if not is_array(leaf):
            return leaf
        require_rows(leaf, f"from_replicated: {jax.tree_util.keystr(path)}", topology)
        if compare and _rows_are_equal(leaf):
            return transfer(leaf[0], topology.mirrored)
        return place_rows(extended, leaf)

    return jax.tree_util.tree_map_with_path(take_in, tree)


def to_replicated(tree: PyTree) -> Any:
    """Converts a tree of values to [R, ...] arrays, one row per replica.

    Args:
      tree: a tree of arrays and PerReplica.

    Locality: M or T in; sharded over the replicas out. Context: cross-replica.

    Raises:
      ContextError: no strategy is active.
      LocalityError: a PerReplica of other replicas.

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> with strategy.scope():
      ...     dj.flax.to_replicated({"w": jnp.ones(3)})["w"].shape
      (2, 3)

    Source: flax.jax_utils.
    """
    topology = _require_scope("to_replicated").topology

    def give_back(path: tuple[Any, ...], leaf: PyTree) -> Any:
        if isinstance(leaf, PerReplica):
            where = f"to_replicated: {jax.tree_util.keystr(path)}"
            require_same_topology(leaf, topology, where)
            return leaf.stacked
        if not is_array(leaf):
            return leaf
        rows = jnp.broadcast_to(leaf, (topology.num_replicas, *leaf.shape))
        return transfer(rows, topology.per_replica)

    return jax.tree_util.tree_map_with_path(give_back, tree, is_leaf=is_per_replica)


def _require_scope(name: str) -> ExtendedLike:
    """Returns the `extended` of the active strategy, or raises a ContextError."""
    frame = frames.current()
    if frame.has_strategy:
        return frame.strategy.extended
    raise ContextError(
        message(
            f"{name} needs the scope of the strategy that runs the step",
            got="a call with no active strategy",
            why="a row belongs to a replica, and the strategy says how many there are and where",
            fix=f"with strategy.scope(): state = dj.flax.{name}(state)",
        )
    )


def _rows_are_equal(leaf: PyTree) -> bool:
    rows = jax.random.key_data(leaf) if jax_compat.is_key_dtype(leaf.dtype) else leaf
    rows = np.asarray(rows)
    return rows[:1].tobytes() * len(rows) == rows.tobytes()
