"""Dynamic loss scaling for NNX; all replicas skip a step, or none does."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distjax.collectives.ops import sum_dtype
from distjax.context import frames
from distjax.errors import message
from distjax.flax.gradients import apply_gradients
from distjax.flax.plans import raw_value
from distjax.typing import PyTree, ReduceOpLike

#: The least and the largest power of two that are normal in float32. An infinite scale would
#: stay infinite.
_BOUNDS = 2.0**-126, 2.0**127


class ScaleState(nnx.Variable[Any]):
    """State of a loss scale: equal on every replica."""


class LossScale(nnx.Pytree):
    """Scales the loss, so that small gradients do not underflow in short float types.

    If gradients overflow on any replica, all replicas skip the update and the scale is
    halved; after `interval` steps without overflow it is doubled.

    Args:
      scale: the initial factor.
      interval: the number of steps without overflow after which the scale grows.

    Batch statistics that the forward pass has written stay, even if the step is skipped.

    Raises:
      ValueError: a scale that is not positive and finite, or an interval below 1.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
      >>> scale = dj.flax.LossScale(1024.0)
      >>> def step(model, optimizer, scale, x):
      ...     grads = nnx.grad(lambda m: scale.scaled(m(x).mean()))(model)
      ...     return scale.apply_gradients(optimizer, model, grads)
      >>> x = jnp.full((1, 2), jnp.inf)
      >>> bool(dj.VirtualStrategy(2).run(step, args=(model, optimizer, scale, x)))
      False
      >>> float(scale.scale[...]), int(optimizer.step[...])
      (512.0, 0)

    Source: Micikevicius et al., "Mixed precision training", 2018;
      flax.training.dynamic_scale.
    """

    def __init__(self, scale: float = 2.0**15, interval: int = 2000):
        if not (_BOUNDS[0] <= scale <= _BOUNDS[1]) or interval < 1:
            raise ValueError(
                message(
                    "LossScale needs a positive, finite scale and an interval of 1 or more",
                    got=f"scale={scale}, interval={interval}",
                    why="gradients are divided by the scale, which only halving and doubling "
                    "changes; it grows after that many steps",
                    fix="dj.flax.LossScale(2.0**15, interval=2000)",
                )
            )
        self.interval = interval
        self.scale = ScaleState(jnp.float32(scale))
        self.good_steps = ScaleState(jnp.int32(0))

    def scaled(self, loss: jax.Array) -> jax.Array:
        """Returns `loss` times the scale: differentiate this."""
        return loss * self.scale[...].astype(loss.dtype)

    def apply_gradients(
        self, optimizer: nnx.Optimizer[Any], model: PyTree, grads: PyTree, op: ReduceOpLike = "mean"
    ) -> Any:
        """Updates `model` unless a gradient overflowed; returns whether it was updated.

        Args:
          optimizer: an `nnx.Optimizer`.
          model: its model.
          grads: gradients of the scaled loss, local to this replica.
          op: how `apply_gradients` reduces them.

        Gradients are converted to float32 or wider, divided by the scale and passed on in
        that dtype: a shorter one might hold neither the scale nor a small gradient.

        Context: replica. Cost: one all-reduce of a number, and `apply_gradients`.
        """
        finite = _all_finite(grads)
        grads = jax.tree.map(self._divided, grads)
        variables = [
            v for _, v in nnx.iter_graph((optimizer, model)) if isinstance(v, nnx.Variable)
        ]
        before = [raw_value(v) for v in variables]
        apply_gradients(optimizer, model, grads, op)
        for variable, old in zip(variables, before, strict=True):
            new = raw_value(variable)
            if new is not old:
                variable.set_raw_value(_select(finite, new, old))
        self._adjust(finite)
        return finite

    def _divided(self, gradient: jax.Array) -> jax.Array:
        wide = sum_dtype(gradient.dtype)
        return gradient.astype(wide) / self.scale[...].astype(wide)

    def _adjust(self, finite: jax.Array) -> None:
        steps = jnp.where(finite, self.good_steps[...] + 1, 0)
        grows = steps >= self.interval
        factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
        self.scale[...] = jnp.clip(self.scale[...] * factor, *_BOUNDS)
        self.good_steps[...] = jnp.where(grows, 0, steps)


def _all_finite(grads: PyTree) -> jax.Array:
    """Returns whether the gradients of all replicas are finite; equal on every replica."""
    leaves = jax.tree.leaves(grads)
    bad = sum(jnp.sum(~jnp.isfinite(g)).astype(jnp.float32) for g in leaves)
    context = frames.current().replica_context
    return jnp.asarray(bad if context is None else context.all_reduce("sum", bad)) == 0


def _select(finite: jax.Array, new: PyTree, old: PyTree) -> Any:
    """Returns `new` if `finite`, else `old`; a split value is selected shard by shard."""
    state = frames.current().state
    held = None if state is None else state.shard_of(new)
    if state is None or held is None:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    shard, form = held
    return state.whole(jnp.where(finite, shard, state.shard_of(old)[0]), form)
