"""Times the first call of a step with many small arrays of state: prints its seconds.

A loss that reads every array, gradients, their mean over the replicas, and gradient descent. The
state is donated, and placed before the clock starts, as the batch is.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import distjax as dj
from benchmarks import handwritten, ours
from benchmarks.models import REPLICA_AXIS

SIZE = 4
LEARNING_RATE = 0.1
HAND_WRITTEN = "hand-written"


def _loss(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    return sum(jnp.sum(x @ w) for w in weights) / len(weights)


def _weights(num_leaves: int) -> list[np.ndarray]:
    return [np.full((SIZE, SIZE), i, np.float32) for i in range(num_leaves)]


def _batch() -> np.ndarray:
    return np.ones((2 * jax.device_count(), SIZE), np.float32)


def _descend(weights: Sequence[jax.Array], grads: Sequence[jax.Array]) -> list[jax.Array]:
    return [w - LEARNING_RATE * g for w, g in zip(weights, grads, strict=True)]


def hand_written(num_leaves: int) -> Callable[[], Any]:
    """The step as `jit` of `shard_map`."""
    mesh = handwritten.make_mesh(jax.devices())
    weights = handwritten.replicate(_weights(num_leaves), mesh)
    x = handwritten.split(_batch(), mesh)

    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        return _descend(weights, lax.pmean(jax.grad(_loss)(weights, x), REPLICA_AXIS))

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P(REPLICA_AXIS)), out_specs=P(), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    return lambda: compiled(weights, x)


def functional(num_leaves: int) -> Callable[[], Any]:
    """The step with distjax, state in and out."""
    strategy = dj.MirroredStrategy()
    weights = handwritten.replicate(_weights(num_leaves), strategy.mesh)
    x = ours.per_replica(strategy, _batch())

    def replica_step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        grads = dj.get_replica_context().all_reduce("mean", jax.grad(_loss)(weights, x))
        return _descend(weights, grads)

    step = dj.jit(lambda w, x: strategy.run(replica_step, args=(w, x)), donate_argnums=0)
    return lambda: step(weights, x)


def merged(num_leaves: int) -> Callable[[], Any]:
    """The step with distjax, state in variables that a merge function updates."""
    strategy = dj.MirroredStrategy()
    with strategy.scope():
        variables = [dj.Variable(w) for w in _weights(num_leaves)]
    x = ours.per_replica(strategy, _batch())

    def apply(strategy: dj.Strategy, grads: list[Any]) -> None:
        extended = strategy.extended
        pairs = list(zip(grads, variables, strict=True))
        for v, mean in zip(variables, extended.batch_reduce_to("mean", pairs), strict=True):
            extended.update(v, lambda v, g: v.assign_sub(LEARNING_RATE * g), args=(mean,))

    def step(x: jax.Array) -> None:
        grads = jax.grad(_loss)([v.value for v in variables], x)
        dj.get_replica_context().merge_call(apply, args=(grads,))

    def call() -> list[jax.Array]:
        strategy.run(step, args=(x,))
        return [v.value for v in variables]

    return call


FORMS = {HAND_WRITTEN: hand_written, "functional": functional, "variables": merged}


def main() -> None:
    """Prints how long the first call of a form takes until its results are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=FORMS, required=True)
    parser.add_argument("--leaves", type=int, default=2000)
    options = parser.parse_args()
    call = FORMS[options.form](options.leaves)
    start = time.perf_counter()
    jax.block_until_ready(call())
    print(json.dumps(time.perf_counter() - start))


if __name__ == "__main__":
    main()
