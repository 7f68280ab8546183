"""Agreement between processes before variables get their initial values."""

from __future__ import annotations

from collections.abc import Sequence

from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact
from distjax.variables.stored_variable import StoredVariable


def agree_on_creation(variables: Sequence[StoredVariable], initial: str) -> None:
    """Waits until every process creates these variables with equal initial values.

    Nothing is broadcast from one process: if seeds differed, a value that is split over the
    replicas would be a mixture that no comparison of copies could detect.

    Args:
      variables: the variables being created.
      initial: their initial values, or the program that computes them, as text.

    Raises:
      AgreementError: the processes differ; no variable gets a value.
      StuckError, PeerLostError: a process does not arrive.
    """
    names = ", ".join(repr(v.name) for v in variables)
    facts = [
        ComparedFact(f"variable {i}, {v.name!r}", _describe(v)) for i, v in enumerate(variables)
    ]
    facts.append(ComparedFact(f"the initial value of {names}", initial))
    agree(f"the creation of {names}", facts)


def _describe(variable: StoredVariable) -> str:
    modes = f"{variable.synchronization.name}, {variable.aggregation.name}"
    return f"{variable.dtype}{list(variable.shape)}, {modes}, {variable.layout}"
