"""Training steps written by hand: `jit` around one `shard_map`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.models import (
    REPLICA_AXIS,
    Model,
    State,
    apply_gradients,
    local_gradients,
)


def make_mesh(devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with one replica per device."""
    return jax.make_mesh((len(devices),), (REPLICA_AXIS,), (AxisType.Auto,), devices=devices)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """The tree with a copy of each leaf on every device of the mesh."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def split(tree: Any, mesh: Mesh) -> Any:
    """The tree with the leading dimension of each leaf split over the replicas."""
    return jax.device_put(tree, NamedSharding(mesh, P(REPLICA_AXIS)))


def make_step(
    model: Model, mesh: Mesh, donate: bool = True
) -> Callable[[State, Any], tuple[State, jax.Array]]:
    """A training step from `(state, batch)` to `(state, mean loss)`.

    Args:
      model: The model to train.
      mesh: One axis, `REPLICA_AXIS`.
      donate: Whether to donate the state.

    Returns:
      The step: a `jax.jit` function of a replicated state and a batch `[R * B, ...]`
      split over the replicas.
    """

    def local_step(state: State, batch: Any) -> tuple[State, jax.Array]:
        loss, stats, grads = local_gradients(model, state, batch)
        grads = lax.pmean(grads, REPLICA_AXIS)
        loss = lax.pmean(loss, REPLICA_AXIS)
        return apply_gradients(model, state, grads, stats), loss

    return jit_over_replicas(local_step, mesh, donate)


def jit_over_replicas(
    local_step: Callable[[Any, Any], tuple[Any, Any]], mesh: Mesh, donate: bool
) -> Any:
    """`jax.jit` of a step `(state, batch)` with mirrored state and split batch."""
    mapped = jax.shard_map(
        local_step,
        mesh=mesh,
        in_specs=(P(), P(REPLICA_AXIS)),
        out_specs=(P(), P()),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(0,) if donate else ())
