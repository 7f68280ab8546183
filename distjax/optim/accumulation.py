"""Gradient accumulation over several steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distjax.modes import ReduceOp, VariableAggregation, VariableSynchronization
from distjax.replica import lax
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.reducing import reduction_layout
from distjax.typing import ArrayLike, DTypeLike, PyTree
from distjax.variables.variable import Variable


class Accumulation:
    """Averages gradients over k steps.

    Each replica sums its own gradients in sync-on-read variables, which needs no
    communication. The counter is equal on every replica, so all replicas take the
    branch that communicates in the same step. Strategies that split gradients (ZeRO 2
    and 3) have no room for a whole one per replica: they reduce at each step, and the
    sum is kept split, beside its variable. A parameter server, which keeps one sum for
    all, also reduces at each step.

    Sums of float16 would overflow, and sums of bfloat16 stagnate: floats are summed in
    float32 or wider. The mean has the dtype of the gradient.

    Args:
      extended: the strategy.
      variables: the variables to optimize.
      num_steps: k, the number of gradients per update.
      op: how the replicas' gradients are reduced. A checkpoint holds the reduced sum, so it can be
        restored with another number of replicas, or where each step reduces, but not with another
        `op`. With a smaller k it may hold k gradients or more: the next step completes them.

    Context: a distjax trace.
    """

    def __init__(
        self,
        extended: StrategyExtended,
        variables: Sequence[Variable],
        num_steps: int,
        op: ReduceOp,
    ):
        self._extended, self._num_steps, self._variables = extended, num_steps, variables
        # Without synchronization there is one sum, of gradients that are already reduced.
        is_mean = op is ReduceOp.MEAN and extended.placement.synchronizes
        self._aggregation = VariableAggregation.MEAN if is_mean else VariableAggregation.SUM
        self._devices = extended.non_slot_devices(variables)
        split = [reduction_layout(extended, v).local_form.is_split for v in variables]
        self.accumulators = [
            self._make_accumulator(v, is_split)
            for v, is_split in zip(variables, split, strict=True)
        ]
        has_one = [extended.num_replicas > 1 and not a.policy.stacked for a in self.accumulators]
        self._reduces_first = [a or b for a, b in zip(split, has_one, strict=True)]
        with extended.colocate_vars_with(self._devices):
            self.counter = Variable(jnp.int32(0), name="accumulated_steps", trainable=False)

    def _make_accumulator(self, variable: Variable, split: bool) -> Variable:
        sync = VariableSynchronization
        with self._extended.colocate_vars_with(variable):
            return Variable(
                jnp.zeros(variable.shape, _sum_dtype(variable.dtype)),
                name=f"{variable.name}/accumulator",
                trainable=False,
                synchronization=sync.ON_WRITE if split else sync.ON_READ,
                aggregation=VariableAggregation.NONE if split else self._aggregation,
            )

    def step(
        self,
        grads: Sequence[Any],
        reduce: Callable[[Sequence[tuple[Any, Variable]]], Sequence[Any]],
        apply: Callable[[list[Any]], None],
    ) -> None:
        """Adds `grads`; every k-th call applies the mean of the accumulated gradients.

        Args:
          grads: a gradient for each variable, in the global view.
          reduce: reduces (value, variable) pairs over the replicas.
          apply: updates the variables with reduced gradients.

        Context: cross-replica, in a trace. Cost: collectives only in the branch of
          the k-th call, except for gradients that are kept split.
        """
        for accumulator, gradient in zip(
            self.accumulators, self._reduce_some(grads, reduce, first=True), strict=True
        ):
            self._extended.update(accumulator, _add, args=(gradient,))
        count = self.counter.value + 1
        is_last = count >= self._num_steps

        def flush() -> None:
            sums = self._reduce_some(self.accumulators, reduce, first=False)
            means = (total / count.astype(total.dtype) for total in sums)
            apply([x.astype(_mean_dtype(g, s)) for x, g, s in zip(means, grads, sums, strict=True)])
            for accumulator in self.accumulators:
                accumulator.assign(jnp.zeros(accumulator.shape, accumulator.dtype))

        lax.cond(is_last, flush, lambda: None)
        count = jnp.where(is_last, 0, count)
        self._extended.update_non_slot(self._devices, self.counter.assign, args=(count,))

    def _reduce_some(
        self, values: Sequence[Any], reduce: Callable[..., Any], *, first: bool
    ) -> list[Any]:
        """Reduces those of `values` that are due before (`first`) or after summation."""
        out = list(values)
        chosen = [i for i, is_first in enumerate(self._reduces_first) if is_first == first]
        pairs = [(out[i], self._variables[i]) for i in chosen]
        for i, value in zip(chosen, reduce(pairs), strict=True):
            out[i] = value
        return out


def _sum_dtype(dtype: DTypeLike) -> DTypeLike:
    is_narrow = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits < 32
    return jnp.float32 if is_narrow else dtype


def _mean_dtype(gradient: PyTree, total: jax.Array) -> DTypeLike:
    """Returns the dtype of the gradient, or of the sum for a gradient without fractions."""
    dtype = getattr(gradient, "dtype", total.dtype)
    return dtype if jnp.issubdtype(dtype, jnp.inexact) else total.dtype


def _add(accumulator: Variable, gradient: ArrayLike) -> None:
    accumulator.assign_add(jnp.asarray(gradient, accumulator.dtype))
