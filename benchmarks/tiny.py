"""A step too small to hide the cost of a call: adds the mean of a batch to each leaf."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

import distjax as dj
from benchmarks.handwritten import jit_over_replicas
from benchmarks.models import REPLICA_AXIS
from benchmarks.ours import assign, read

LEAF_SHAPE = (8,)
Step = Callable[[Any, Any], tuple[Any, Any]]


def leaves(num_leaves: int, num_replicas: int | None = None) -> list[np.ndarray]:
    """The first state: small arrays, with a leading `[R]` for one per replica."""
    shape = LEAF_SHAPE if num_replicas is None else (num_replicas, *LEAF_SHAPE)
    return [np.zeros(shape, np.float32) for _ in range(num_leaves)]


def state(num_leaves: int, tree: str) -> Any:
    """The first state as a "list", or as a "dict" by name, which JAX sorts at each call."""
    arrays = leaves(num_leaves)
    return arrays if tree == "list" else {f"w{i}": leaf for i, leaf in enumerate(arrays)}


def batch(num_replicas: int) -> np.ndarray:
    """One batch, 8 numbers per replica."""
    return np.ones(num_replicas * 8, np.float32)


def handwritten_step(mesh: Mesh, donate: bool) -> Step:
    """The step by hand: `jax.jit` around `shard_map`, mirrored leaves."""

    def local_step(state: Any, batch: jax.Array) -> Any:
        mean = lax.pmean(batch.mean(), REPLICA_AXIS)
        return jax.tree.map(lambda leaf: leaf + mean, state), mean

    return jit_over_replicas(local_step, mesh, donate)


def functional_step(strategy: dj.MirroredStrategy) -> Step:
    """The step with distjax, state in and state out, mirrored or per replica."""

    def replica_step(state: Any, batch: jax.Array) -> Any:
        mean = dj.get_replica_context().all_reduce("mean", batch.mean())
        return jax.tree.map(lambda leaf: leaf + mean, state), mean

    return lambda state, batch: strategy.run(replica_step, args=(state, batch))


def variable_step(strategy: dj.MirroredStrategy, num_leaves: int) -> Callable[[Any], Any]:
    """The step with distjax, leaves in variables, updated in a merge function."""
    with strategy.scope():
        variables = [dj.Variable(leaf) for leaf in leaves(num_leaves)]

    def apply(strategy: dj.MirroredStrategy, mean: Any) -> jax.Array:
        mean = strategy.reduce("mean", mean)
        assign(variables, [value + mean for value in read(variables)])
        return mean

    def replica_step(batch: jax.Array) -> jax.Array:
        return dj.get_replica_context().merge_call(apply, args=(batch.mean(),))

    return lambda batch: strategy.run(replica_step, args=(batch,))
