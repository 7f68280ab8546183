"""Facts of cross-replica code: what its reductions make of what replicas computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from distjax.context import frames
from distjax.jax_compat import JaxprEqn
from distjax.replica import reduction_findings as findings
from distjax.replica.facts import EQUAL, Fact, FactWalk
from distjax.variables.state import ShapeState

_REDUCTION = "distjax_reduce_"


def call_as_reduction(
    name: str, reduce: Callable[[Sequence[Any]], list[Any]], arrays: Sequence[Any]
) -> list[Any]:
    """Returns ``reduce(arrays)``; where a merge is traced for shapes, by one equation.

    So what is known of the arrays is followed through the merge; the program has no trace of it.

    Args:
      name: "SUM", "MEAN" or "GATHER"; another one of what is not followed.
      reduce: the reduction.
      arrays: what it reduces.
    """
    if not isinstance(frames.current().state, ShapeState):
        return reduce(arrays)

    def call(arrays: Sequence[Any]) -> list[Any]:
        return reduce(arrays)

    call.__name__ = f"{_REDUCTION}{name}"
    return jax.jit(call)(list(arrays))


def reduced(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """The rule of such an equation; None of any other call."""
    name = str(eqn.params.get("name"))
    if not name.startswith(_REDUCTION):
        return None
    op, walk.across = name.removeprefix(_REDUCTION), True
    outs = [follow(walk, op, eqn, x) for x in ins]
    walk.across = False
    return outs


def follow(walk: FactWalk, op: str, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns what is known of `x` reduced over the replicas in cross-replica code."""
    if op not in ("SUM", "MEAN", "GATHER"):  # over elements too
        return EQUAL
    if op == "GATHER":
        return EQUAL.having(gathered=walk.site(eqn))
    if op == "MEAN" and not x.differs:  # which costs nothing, and changes nothing
        return x
    total = findings.summed(walk, eqn, x)
    return findings.divided(walk, eqn, total) if op == "MEAN" else total
