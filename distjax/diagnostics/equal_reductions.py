"""Finds reductions of values that are already equal on every replica.

They are legal: the sum is R times the value, the mean the value itself. But they communicate
for nothing, and often show that something is reduced twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from distjax import jax_compat
from distjax.context.observer import ProvesLocality
from distjax.jax_compat import Literal

_REDUCTIONS = frozenset("psum psum_invariant pmax pmin reduce_scatter".split())


def equal_reductions(
    jaxpr: jax_compat.Jaxpr, varying: Sequence[bool], analysis: ProvesLocality
) -> Iterator[Any]:
    """Yields the equations of replica code, at any depth, that reduce an equal value.

    Transposes of reductions are skipped, since the user did not write them.

    Args:
      jaxpr: replica code.
      varying: which of its inputs may differ between replicas.
      analysis: the rules of the replica axis.
    """
    env = analysis.values(jaxpr, varying)
    for eqn in jaxpr.eqns:
        ins = [not isinstance(v, Literal) and env[v] for v in eqn.invars]
        is_reduction = eqn.primitive.name in _REDUCTIONS and analysis.over_replicas(eqn)
        if is_reduction and not all(ins) and "transpose(" not in str(eqn.source_info.name_stack):
            yield eqn
        outs = [env[v] for v in eqn.outvars]
        for inner, inner_ins in _inner(eqn, ins, outs):
            yield from equal_reductions(inner, inner_ins, analysis)


def _inner(
    eqn: jax_compat.JaxprEqn, ins: list[bool], outs: list[bool]
) -> Iterator[tuple[Any, list[bool]]]:
    """Yields the jaxprs that an equation runs, and whether each input may vary."""
    name = eqn.primitive.name
    if name == "scan":
        consts, carry, xs = jax_compat.split_scan_inputs(eqn, ins)
        ins = [*consts, *outs[: len(carry)], *xs]  # the carry at the fixpoint
    elif name == "while":
        body, _ = jax_compat.open_jaxpr(eqn.params["body_jaxpr"])
        yield body, [*jax_compat.split_while_inputs(eqn, ins)[1], *outs]
        return
    elif name == "cond":
        ins = ins[1:]
    for inner in jax_compat.sub_jaxprs(eqn):
        if len(inner.invars) == len(ins):
            yield inner, ins
