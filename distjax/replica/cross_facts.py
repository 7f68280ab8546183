"""Facts about cross-replica code: how its reductions affect replicas' values.

Inside a merge function, values are tracked as in a replica function. Between two runs, a value is
recognized by its identity: as the result of a run, or of a reduction of one.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from distjax.context import frames
from distjax.jax_compat import JaxprEqn
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.replica import fact_reductions as reductions
from distjax.replica import reduction_findings as findings
from distjax.replica.facts import DIFFERS, EQUAL, Fact, FactWalk, Site, SiteRecord, Where
from distjax.replica.merge import reduction_of
from distjax.typing import PyTree
from distjax.user_lines import calling_line
from distjax.variables.state import MergeState


def reduced(walk: FactWalk, eqn: JaxprEqn, ins: Sequence[Fact]) -> list[Fact] | None:
    """The rule for reductions in cross-replica code; None for any other call."""
    op = reduction_of(eqn)
    if op is None:
        return None
    walk.across = True
    outs = [follow(walk, op, eqn, x) for x in ins]
    walk.across = False
    return outs


def follow(walk: FactWalk, op: str, eqn: JaxprEqn, x: Fact) -> Fact:
    """Returns the fact of `x` reduced over the replicas in cross-replica code."""
    if op not in ("SUM", "MEAN", "GATHER"):  # also reduces over elements
        return EQUAL
    if op == "GATHER":
        return EQUAL.having(gathered=walk.site(eqn))
    if op == "MEAN" and not x.differs:  # free, and the identity
        return x
    total = reductions.summed(walk, eqn, x)
    return reductions.divided(walk, eqn, total) if op == "MEAN" else total


# -- between two runs ----------------------------------------------------------

#: Tags that are carried over to other functions: of reductions, and of values not to be reduced.
_CARRIED = frozenset(
    "averaged summed gathered times_R whole mean share ratio curved variance norm clipped chosen "
    "grad gradient repeated".split()
)
#: Facts about live arrays, by identity. The arrays are results of first calls.
_known: dict[int, tuple[weakref.ref[Any], Fact]] = {}


def remember(values: Sequence[PyTree], facts: Sequence[Fact | None]) -> None:
    """Remembers facts about arrays or PerReplicas for as long as these live.

    State is left out: it is no longer a reduction, and is reported where it is updated.
    """
    if len(values) == len(facts):  # else there are objects or variables among the values
        for value, fact in zip(values, facts, strict=True):
            if fact is not None and not fact.find("base"):
                _remember(getattr(value, "stacked", value), fact)


def remember_own(tree: PyTree) -> None:
    """Remembers that bare arrays are a single replica's own: a PerReplica if there were more.

    So a step on one replica is judged as on several. What else it takes counts as equal.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, (jax.Array, np.ndarray)):
            _store(leaf, DIFFERS)


def is_own(value: PyTree) -> bool:
    """Returns whether a value is a replica's own: a PerReplica, or a single replica's array."""
    if isinstance(value, PerReplica):
        return True
    fact = recall(value)
    return fact is not None and fact.differs


def _remember(array: PyTree, fact: Fact) -> None:
    tags = frozenset((name, _without_trace(held)) for name, held in fact.tags if name in _CARRIED)
    if (tags or fact.differs) and isinstance(array, jax.Array):
        _store(array, Fact(fact.differs, None, tags))


def _store(array: PyTree, fact: Fact) -> None:
    key = id(array)
    _known[key] = weakref.ref(array, lambda _: _known.pop(key, None)), fact


def recall(value: PyTree) -> Fact | None:
    """Returns the fact of an array or PerReplica, or None."""
    array = getattr(value, "stacked", value)
    reference, fact = _known.get(id(array), (lambda: None, None))
    return fact if reference() is array else None


def _without_trace(held: object) -> Any:
    if isinstance(held, Site):
        return SiteRecord(held.source, held.is_mean, held.names)
    return tuple(map(_without_trace, held)) if type(held) is tuple else held


def follow_between_runs(
    op: str, arrays: Sequence[Any], outs: Sequence[Any], topology: Topology
) -> None:
    """Reports mistakes in a cross-replica reduction; remembers facts of its results."""
    facts = [recall(array) for array in arrays] if _is_between_runs() else []
    for out, fact in zip(outs, facts, strict=False):
        if fact is not None and fact.tags:
            walk = _EagerWalk(topology)
            remember([out], [follow(walk, op, _ANY, fact)])
            walk.report()


def report_unfit_between_runs(op: str, gradients: Sequence[PyTree], topology: Topology) -> None:
    """Reports gradients that do not fit an optimizer with reduction `op`."""
    for fact in map(recall, gradients) if _is_between_runs() else ():
        if fact is not None:
            walk = _EagerWalk(topology)
            findings.find_unfit_gradients(walk, op, _ANY, fact)
            walk.report()


def _is_between_runs() -> bool:
    return bool(_known) and not isinstance(frames.current().state, MergeState)


#: Stands in for an equation: operations between runs happen at the line now running.
_ANY: Any = None


class _EagerWalk(FactWalk):
    """The walk over one operation between runs, for which the line now running stands."""

    def __init__(self, topology: Topology):
        super().__init__({}, topology.axis_name, topology.num_replicas, frozenset())
        self.across = True

    def site(self, eqn: JaxprEqn) -> Where:
        """Returns the user's line that is running."""
        return SiteRecord(calling_line(), False, "")

    def is_transposed(self, eqn: JaxprEqn) -> bool:
        """Returns False: nothing here is part of a backward pass."""
        return False
