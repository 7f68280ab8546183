"""Converts to and from trees with the leading axis of `flax.jax_utils.replicate`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax import jax_compat
from distjax.context import frames
from distjax.errors import ContextError, message
from distjax.placement.per_replica import PerReplica, is_per_replica
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
    frame = frames.current()
    if not frame.has_strategy:
        raise ContextError(
            message(
                "from_replicated needs the scope of the strategy that takes the tree",
                got="a call with no active strategy",
                why="a row belongs to a replica, and the strategy says where that is",
                fix="with strategy.scope(): state = dj.flax.from_replicated(state)",
            )
        )
    extended = frame.strategy.extended
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

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> with strategy.scope():
      ...     dj.flax.to_replicated({"w": jnp.ones(3)})["w"].shape
      (2, 3)

    Source: flax.jax_utils.
    """
    topology = frames.current().strategy.extended.topology

    def give_back(leaf: PyTree) -> Any:
        if isinstance(leaf, PerReplica):
            return leaf.stacked
        if not is_array(leaf):
            return leaf
        rows = jnp.broadcast_to(leaf, (topology.num_replicas, *leaf.shape))
        return transfer(rows, topology.per_replica)

    return jax.tree.map(give_back, tree, is_leaf=is_per_replica)


def _rows_are_equal(leaf: PyTree) -> bool:
    rows = jax.random.key_data(leaf) if jax_compat.is_key_dtype(leaf.dtype) else leaf
    rows = np.asarray(rows)
    return rows[:1].tobytes() * len(rows) == rows.tobytes()
