"""ExplanationDiff: the differences between two explanations."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from distjax.context.finding import Finding
from distjax.diagnostics.notes import RunProof
from distjax.diagnostics.program_collectives import Collective, collective_table
from distjax.tables import Table, as_html, as_text

_T = TypeVar("_T")


class Explained(Protocol):
    """The part of an `Explanation` that is compared."""

    @property
    def name(self) -> str: ...
    @property
    def written(self) -> Sequence[Collective]: ...
    @property
    def runs(self) -> Sequence[RunProof]: ...
    @property
    def findings(self) -> Sequence[Finding]: ...


@dataclasses.dataclass(frozen=True)
class ProofChange:
    """A result or written variable for which the two steps prove different things.

    Attributes:
      path: its path; "the result" if there is only one.
      first: "M" (equal on every replica), "T" (a value per replica) or "-" (absent).
      second: the same for the second step.
      why_first: the reductions that made it equal, or the lines that made it differ.
      why_second: the same for the second step.
    """

    path: str
    first: str
    second: str
    why_first: str
    why_second: str


@dataclasses.dataclass(frozen=True)
class ExplanationDiff:
    """What only one of two explanations reduces, proves or finds.

    ``print`` it, or show it in a notebook. Since lines of code may have moved, collectives are
    compared by kind and bytes, results and variables by path, findings by rule.

    Attributes:
      names: the names of the two functions.
      reduced: the collectives in the code of only the first step, and of only the second.
      proofs: what is proved differently.
      findings: the findings of only the first step, and of only the second.
    """

    names: tuple[str, str]
    reduced: tuple[tuple[Collective, ...], tuple[Collective, ...]]
    proofs: tuple[ProofChange, ...]
    findings: tuple[tuple[Finding, ...], tuple[Finding, ...]]

    def to_json(self, indent: int | None = None) -> str:
        """Returns the difference as JSON.

        Args:
          indent: spaces to indent by; None: one line.
        """
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def __str__(self) -> str:
        return as_text(list(self._tables()))

    def _repr_html_(self) -> str:
        return as_html(list(self._tables()))

    def _tables(self) -> Iterator[Table]:
        differs = any((*self.reduced, self.proofs, *self.findings))
        what = "" if differs else " nothing differs in what is reduced, proved or found"
        yield Table(f"{' -> '.join(self.names)}:{what}")
        for which, collectives in zip(("first", "second"), self.reduced, strict=True):
            if collectives:
                yield collective_table(f"reduced in the {which} only:", collectives)
        if self.proofs:
            yield Table(
                "proved (T: a value per replica, M: equal on every replica):",
                ("", "first", "second", "why in the first", "why in the second"),
                tuple(dataclasses.astuple(change) for change in self.proofs),
            )
        for which, findings in zip(("first", "second"), self.findings, strict=True):
            if findings:
                rows = tuple((f.level, f.rule, f.source) for f in findings)
                yield Table(f"found in the {which} only:", ("level", "", "line"), rows)


def diff_explanations(first: Explained, second: Explained) -> ExplanationDiff:
    """Returns the differences between two explanations."""
    cost = lambda collective: (collective.kind, collective.result_bytes)
    return ExplanationDiff(
        names=(first.name, second.name),
        reduced=_only(first.written, second.written, cost),
        proofs=tuple(_changes(_proofs(first), _proofs(second))),
        findings=_only(first.findings, second.findings, lambda finding: finding.rule),
    )


def _only(
    first: Sequence[_T], second: Sequence[_T], key: Callable[[_T], Hashable]
) -> tuple[tuple[_T, ...], tuple[_T, ...]]:
    """Returns what only the first and what only the second has, regardless of order."""

    def missing(those: Sequence[_T], others: Sequence[_T]) -> Iterator[_T]:
        left = collections.Counter(map(key, others))
        for each in those:
            left[key(each)] -= 1
            if left[key(each)] < 0:
                yield each

    return tuple(missing(first, second)), tuple(missing(second, first))


def _proofs(explanation: Explained) -> dict[tuple[int, str], tuple[str, str]]:
    """Returns (letter, why) of each run's results and written variables."""
    return {
        (number, path or "the result"): (letter, why)
        for number, run in enumerate(explanation.runs)
        for path, letter, why in run.why
    }


def _changes(
    first: Mapping[tuple[int, str], Any], second: Mapping[tuple[int, str], Any]
) -> Iterator[ProofChange]:
    for key in dict.fromkeys((*first, *second)):
        (before, why_before), (after, why_after) = first.get(key, _NONE), second.get(key, _NONE)
        if before != after:
            number, path = key
            where = f"{path} of run {number + 1}" if number else path
            yield ProofChange(where, before, after, why_before, why_after)


_NONE = ("-", "")
