"""What processes of a job compare before variables get their initial values."""

from __future__ import annotations

from collections.abc import Sequence

from distjax.cluster.agreement import agree
from distjax.cluster.facts import Fact
from distjax.variables.stored_variable import StoredVariable


def agree_on_creation(variables: Sequence[StoredVariable], initial: str) -> None:
    """Returns when every process makes these variables, with equal initial values.

    Nothing is broadcast from one process: from unequal seeds a value that is split over the
    replicas would be a mixture that no comparison of copies finds.

    Args:
      variables: those that are being made.
      initial: their initial values, or the program that computes them, as text.

    Raises:
      AgreementError: processes differ; no variable has a value.
      StuckError, PeerLostError: a process does not come.
    """
    names = ", ".join(repr(v.name) for v in variables)
    facts = [Fact(f"variable {i}, {v.name!r}", _describe(v)) for i, v in enumerate(variables)]
    facts.append(Fact(f"the initial value of {names}", initial))
    agree(f"the creation of {names}", facts)


def _describe(variable: StoredVariable) -> str:
    modes = f"{variable.synchronization.name}, {variable.aggregation.name}"
    return f"{variable.dtype}{list(variable.shape)}, {modes}, {variable.layout}"
