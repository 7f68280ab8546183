"""Gradients added up over several steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from distjax.modes import VariableAggregation, VariableSynchronization
from distjax.replica import lax
from distjax.strategies.contracts import ExtendedContract
from distjax.strategies.destinations import reduction_layout
from distjax.typing import ArrayLike
from distjax.variables.variable import Variable


class Accumulation:
    """The mean of each replica's gradients over k steps.

    Kept per replica, in sync-on-read variables: adding to them communicates
    nothing. The counter is equal on every replica, so all arrive together at
    the branch that communicates. Where a strategy splits gradients (ZeRO 2 and
    3) a whole one per replica is what does not fit: there each step reduces, and
    the sum is kept split, beside its variable.

    Args:
      extended: the strategy.
      variables: the variables to be optimized.
      num_steps: k, the number of gradients per update.

    Context: a trace of distjax.
    """

    def __init__(self, extended: ExtendedContract, variables: Sequence[Variable], num_steps: int):
        self._extended, self._num_steps, self._variables = extended, num_steps, variables
        self._devices = extended.non_slot_devices(variables)
        self._is_split = [reduction_layout(extended, v).local_form.is_split for v in variables]
        self.accumulators = [
            self._make_accumulator(v, split)
            for v, split in zip(variables, self._is_split, strict=True)
        ]
        with extended.colocate_vars_with(self._devices):
            self.counter = Variable(jnp.int32(0), name="accumulated_steps", trainable=False)

    def _make_accumulator(self, variable: Variable, split: bool) -> Variable:
        sync, aggregation = VariableSynchronization, VariableAggregation
        with self._extended.colocate_vars_with(variable):
            return Variable(
                jnp.zeros(variable.shape, variable.dtype),
                name=f"{variable.name}/accumulator",
                trainable=False,
                synchronization=sync.ON_WRITE if split else sync.ON_READ,
                aggregation=aggregation.NONE if split else aggregation.SUM,
            )

    def step(
        self,
        grads: Sequence[Any],
        reduce: Callable[[Sequence[tuple[Any, Variable]]], Sequence[Any]],
        apply: Callable[[list[Any]], None],
    ) -> None:
        """Adds `grads`; every k-th time applies the mean of what has been added.

        Args:
          grads: a gradient for each variable, in the global view.
          reduce: reduces values over the replicas to variables, given in pairs.
          apply: updates the variables by reduced gradients.

        Context: cross-replica, in a trace. Cost: collectives inside the branch
          only, but for gradients that are kept split.
        """
        for accumulator, gradient in zip(
            self.accumulators, self._reduce_some(grads, reduce, split=True), strict=True
        ):
            self._extended.update(accumulator, _add, args=(gradient,))
        count = self.counter.value + 1
        is_last = count == self._num_steps

        def flush() -> None:
            sums = self._reduce_some(self.accumulators, reduce, split=False)
            apply([(g / self._num_steps).astype(g.dtype) for g in sums])
            for accumulator in self.accumulators:
                accumulator.assign(jnp.zeros(accumulator.shape, accumulator.dtype))

        lax.cond(is_last, flush, lambda: None)
        count = jnp.where(is_last, 0, count)
        self._extended.update_non_slot(self._devices, self.counter.assign, args=(count,))

    def _reduce_some(
        self, values: Sequence[Any], reduce: Callable[..., Any], *, split: bool
    ) -> list[Any]:
        """Returns `values` with those reduced that are kept split, or those that are not."""
        out = list(values)
        chosen = [i for i, is_split in enumerate(self._is_split) if is_split == split]
        pairs = [(out[i], self._variables[i]) for i in chosen]
        for i, value in zip(chosen, reduce(pairs), strict=True):
            out[i] = value
        return out


def _add(accumulator: Variable, gradient: ArrayLike) -> None:
    accumulator.assign_add(jnp.asarray(gradient, accumulator.dtype))
