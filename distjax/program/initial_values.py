"""The initial values of variables that a step creates, computed where they will live."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distjax import hooks, jax_compat
from distjax.program.step import Step
from distjax.variables import access
from distjax.variables.storage import hand_out
from distjax.variables.variable import Variable


class InitialValues:
    """The initial values of created variables, as a part of the traced step.

    Args:
      jaxpr: the traced step; its last inputs are the global values of `reads`.
      consts: the constants of `jaxpr`.
      reads: the variables that the step reads.
      outvars: for each created variable, the output that is its initial value.
    """

    def __init__(
        self,
        jaxpr: jax_compat.Jaxpr,
        consts: Sequence[Any],
        reads: Sequence[Variable],
        outvars: Mapping[Variable, Any],
    ):
        self._jaxpr, self._consts = jaxpr, consts
        self._reads, self._outvars = reads, outvars

    def store(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Computes the values for a call with these arguments, and stores them."""
        with jax_compat.outside_traces():
            self.compute(step, args, kwargs)
        for variable in self._outvars:
            variable.stored.complete_creation()

    def compute(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Computes the values for a call with these arguments; the variables store them later.

        Uses one program per strategy, with explicit output shardings, so that no value is ever
        whole on one device.
        """
        groups: dict[Any, list[Variable]] = {}
        for variable in self._outvars:
            groups.setdefault(variable.strategy, []).append(variable)
        read = (as_global(v, hand_out(v.stored)) for v in self._reads)
        inputs = [*jax.tree.leaves(step.place((args, kwargs))), *read]
        for variables in groups.values():
            values = self._compute_together(variables, inputs)
            for variable, value in zip(variables, values, strict=True):
                if variable.storage is None:
                    variable.stored.complete = functools.partial(_store, variable, value)

    def _compute_together(
        self, variables: Sequence[Variable], inputs: Sequence[Any]
    ) -> Sequence[Any]:
        part = jax_compat.needed_for(self._jaxpr, [self._outvars[v] for v in variables])

        def initial(arrays: Sequence[Any]) -> list[Any]:
            values = jax_compat.eval_jaxpr(part, self._consts, arrays)
            return [_in_stored_form(v, x) for v, x in zip(variables, values, strict=True)]

        shardings = [v.sharding if v.size else None for v in variables]
        compiled = jax.jit(initial, out_shardings=shardings)
        for told in hooks.on_created:
            told(variables, lambda: compiled.lower(inputs))
        return compiled(inputs)


def as_global(variable: Variable, stored: jax.Array) -> Any:
    """Returns a variable's stored array as its value in the global view."""
    return variable.layout.from_stored(stored, variable.shape)


def _in_stored_form(variable: Variable, value: jax.Array) -> Any:
    """Returns `value` in stored form, as a copy: a result of `jit` may be one of its inputs."""
    if not variable.size:
        return value
    return variable.layout.to_stored(jnp.broadcast_to(jnp.copy(value), variable.global_shape))


def _store(variable: Variable, value: jax.Array) -> None:
    if variable.size:
        variable.stored.swap(value)
    else:  # JAX cannot place empty outputs: those are placed separately
        access.initialize(variable, value)
