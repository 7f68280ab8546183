"""One trace of a merge function, in the global view.

It tells the function's shapes and variables. If the values that come have the localities and types
with which it was made, it also stands for the call of the function, which is not traced again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from distjax import jax_compat
from distjax.context import frames
from distjax.jax_compat import Jaxpr, Literal, ShapedArray
from distjax.replica.cross_facts import is_reduction
from distjax.replica.global_value import GlobalValue
from distjax.replica.partitioned_tree import PartitionedTree
from distjax.traced_types import have_types_of
from distjax.variables.state import with_variables_as_inputs
from distjax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class MergeTrace:
    """A traced merge function.

    Attributes:
      jaxpr, consts: array arguments -> array results, then the new values of `written`, all in
        the global view: [R, ...] where they differ.
      varying: which array arguments differ.
      read: the variables whose values the function needs, in order of first read.
      written: the variables that it writes, in order of first write.
      created: the variables that it creates.
      result: the pytree of results.
      out_avals: shapes and dtypes of the outputs, in the replica view.
      out_varying: which array results differ.
      is_pure: whether a call has no other effects.
    """

    jaxpr: Jaxpr
    consts: list[Any]
    varying: tuple[bool, ...]
    read: list[Variable]
    written: list[Variable]
    created: list[Variable]
    result: PartitionedTree
    out_avals: list[ShapedArray]
    out_varying: list[bool]
    is_pure: bool

    @property
    def only_reduces(self) -> bool:
        """Whether arguments that differ are only reduced, or passed on as results."""
        # JAX 0.12 counts constants among the inputs; they come first.
        arguments = self.jaxpr.invars[len(self.jaxpr.invars) - len(self.varying) :]
        differ = {v for v, d in zip(arguments, self.varying, strict=True) if d}
        others = (e for e in self.jaxpr.eqns if not is_reduction(e))
        return not any(v in differ for e in others for v in e.invars if not isinstance(v, Literal))

    def call(self, args: Sequence[GlobalValue], variables: Sequence[Any]) -> list[Any] | None:
        """Returns the outputs of the jaxpr; None if the function might be traced differently.

        Args:
          args: the array arguments.
          variables: the values of `read`, in global form.
        """
        operands = [*(x.array for x in args), *variables]
        code, _ = with_variables_as_inputs(self.jaxpr)
        is_alike = (
            tuple(x.varying for x in args) == self.varying
            and self.is_pure
            and not self.created
            and not any(isinstance(c, jax_compat.Tracer) for c in self.consts)  # of another trace
            and not _holds_custom_rules(self.jaxpr)
            and have_types_of(operands, code.invars[len(code.invars) - len(operands) :])
        )
        # An observer is told of reductions while the function runs.
        if not is_alike or frames.observer() is not None:
            return None
        eqns = [jax_compat.as_inlined(e) if is_reduction(e) else e for e in code.eqns]
        return jax_compat.eval_jaxpr(code.replace(eqns=eqns), self.consts, operands)


def _holds_custom_rules(jaxpr: Jaxpr) -> bool:
    """Returns whether differentiating the jaxpr calls functions of the user.

    Those of `jax.custom_vjp` may close over values of the trace, which has ended by then.
    """
    return any(
        eqn.primitive.name.startswith("custom_")
        or any(map(_holds_custom_rules, jax_compat.sub_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )
