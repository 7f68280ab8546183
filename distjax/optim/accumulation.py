"""Gradients added up over several steps, communicated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from distjax.replica import lax
from distjax.variables.policy import VariableAggregation, VariableSynchronization
from distjax.variables.variable import Variable


class Accumulation:
    """The mean of each replica's gradients over k steps, kept per replica.

    Accumulators are sync-on-read variables: adding to them communicates
    nothing. The counter is equal on every replica, so all arrive together at
    the branch that communicates.

    Args:
      extended: the strategy.
      variables: the variables to be optimized.
      num_steps: k, the number of gradients per update.

    Context: a trace of distjax.
    """

    def __init__(self, extended: Any, variables: Sequence[Variable], num_steps: int):
        self._extended, self._num_steps = extended, num_steps
        self._devices = extended.non_slot_devices(variables)
        self.accumulators = [self._make_accumulator(v) for v in variables]
        with extended.colocate_vars_with(self._devices):
            self.counter = Variable(jnp.int32(0), name="accumulated_steps", trainable=False)

    def _make_accumulator(self, variable: Variable) -> Variable:
        with self._extended.colocate_vars_with(variable):
            return Variable(
                jnp.zeros(variable.shape, variable.dtype),
                name=f"{variable.name}/accumulator",
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.SUM,
            )

    def step(self, grads: Sequence[Any], communicate: Callable[[list[Any], int], None]) -> None:
        """Adds `grads`; every k-th time communicates what has been added.

        Args:
          grads: a gradient for each variable, in the global view.
          communicate: reduces values (the accumulators) over the replicas,
            divides by a number (k), and updates the variables.

        Context: cross-replica, in a trace. Cost: collectives inside the branch
          only.
        """
        for accumulator, gradient in zip(self.accumulators, grads, strict=True):
            self._extended.update(accumulator, _add, args=(gradient,))
        count = self.counter.value + 1
        is_last = count == self._num_steps

        def flush() -> None:
            communicate(self.accumulators, self._num_steps)
            for accumulator in self.accumulators:
                accumulator.assign(jnp.zeros(accumulator.shape, accumulator.dtype))

        lax.cond(is_last, flush, lambda: None)
        count = jnp.where(is_last, 0, count)
        self._extended.update_non_slot(self._devices, self.counter.assign, args=(count,))


def _add(accumulator: Variable, gradient: Any) -> None:
    accumulator.assign_add(jnp.asarray(gradient, accumulator.dtype))
