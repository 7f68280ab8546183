"""reduce_gradients: the reduction as a link of an optax chain."""

from __future__ import annotations

from typing import Any

import optax

from distjax.collectives.ops import as_reduce_op
from distjax.context import frames
from distjax.errors import ContextError, require
from distjax.typing import PyTree, ReduceOpLike


def reduce_gradients(op: ReduceOpLike = "mean") -> optax.GradientTransformation:
    """Returns an optax transformation that reduces gradients over the replicas.

    ``update(g) = all_reduce(op, g)``. Put it first in a chain, so that later links see
    the global gradient and norms are those of the global batch.

    Args:
      op: a ReduceOp or its name.

    Locality: T or M in, M out. Context: replica; without an active strategy it is the
      identity.
    Cost: one all-reduce per leaf. State: none.

    Raises:
      ContextError: `update` in cross-replica context.

    Example:
      >>> import optax
      >>> tx = optax.chain(dj.optim.reduce_gradients("mean"), optax.sgd(0.5))
      >>> def step(w):
      ...     x = dj.get_replica_context().replica_id_in_sync_group
      ...     g = jax.grad(lambda w: w * x)(w)
      ...     updates, _ = tx.update(g, tx.init(w))
      ...     return optax.apply_updates(w, updates)
      >>> dj.VirtualStrategy(3).run(step, args=(jnp.float32(1),))
      Array(0.5, dtype=float32)
    """
    op = as_reduce_op(op)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[Any, Any]:
        frame = frames.current()
        require(
            frame.replica_context is not None,
            ContextError,
            "reduce_gradients needs a replica context",
            got=frame.name,
            why="in cross-replica context there is one gradient for all replicas, not one "
            "per replica",
            fix="strategy.reduce(op, grads) before tx.update; dj.optim.Optimizer reduces by itself",
        )
        return frame.replica_context.all_reduce(op, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)
