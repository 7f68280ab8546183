"""Trees with the leading axis of `flax.jax_utils.replicate`, taken in and given back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distjax import jax_compat
from distjax.context import frames
from distjax.errors import LocalityError, describe_value, message
from distjax.placement.per_replica import PerReplica, is_per_replica
from distjax.placement.topology import Topology
from distjax.replica.arguments import is_array
from distjax.typing import PyTree


def from_replicated(tree: PyTree) -> Any:
    """Returns a tree of [R, ...] arrays as what `run` takes.

    Leaves whose R rows are equal become one mirrored array [...], others (batch
    statistics that no one synchronised) a PerReplica.

    Args:
      tree: as `jax_utils.replicate` and functions under `jax.pmap` give it.

    Locality: unplaced in, M or T out. Context: cross-replica. Cost: every leaf is
      compared on the host.

    Raises:
      LocalityError: a leaf without a leading dimension of R.

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> with strategy.scope():
      ...     tree = dj.flax.from_replicated({"w": np.ones((2, 3)), "mean": np.arange(2.0)})
      >>> tree["w"].shape, type(tree["mean"]).__name__
      ((3,), 'PerReplica')

    Source: flax.jax_utils.
    """
    strategy = frames.current().strategy
    topology = strategy.extended.topology
    wraps = strategy.extended.wraps

    def take_in(path: tuple[Any, ...], leaf: PyTree) -> Any:
        if not is_array(leaf):
            return leaf
        _require_rows(leaf, jax.tree_util.keystr(path), topology)
        if _rows_are_equal(leaf) or not wraps:
            return jax.device_put(leaf[0], topology.mirrored)
        return PerReplica(jax.device_put(leaf, topology.per_replica), topology)

    return jax.tree_util.tree_map_with_path(take_in, tree)


def to_replicated(tree: PyTree) -> Any:
    """Returns a tree of values as [R, ...] arrays, a row per replica.

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
        return jax.device_put(rows, topology.per_replica)

    return jax.tree.map(give_back, tree, is_leaf=is_per_replica)


def _require_rows(leaf: PyTree, path: str, topology: Topology) -> None:
    if leaf.ndim and leaf.shape[0] == topology.num_replicas:
        return
    raise LocalityError(
        message(
            f"from_replicated: {path} needs a leading dimension of {topology.num_replicas}, a row "
            "per replica",
            got=describe_value(leaf),
            why="jax_utils.replicate stacks one copy for each device",
            fix="pass trees without that dimension to run as they are",
        )
    )


def _rows_are_equal(leaf: PyTree) -> bool:
    rows = jax.random.key_data(leaf) if jax_compat.is_key_dtype(leaf.dtype) else leaf
    rows = np.asarray(rows)
    return rows[:1].tobytes() * len(rows) == rows.tobytes()
