"""ExplanationDiff: in what two explanations differ."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from distjax.context.finding import Finding
from distjax.diagnostics.notes import RunProof
from distjax.diagnostics.program_collectives import Collective
from distjax.tables import Table, as_html, as_text, format_bytes

_T = TypeVar("_T")


class Explained(Protocol):
    """What is compared of an `Explanation`: see there."""

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
    """A result, or a variable that is written, that is equal in one step and differs in the other.

    Attributes:
      path: where it is; "the result" for a lone one.
      first: "M" (equal on every replica), "T" (a value per replica) or "-" (not there).
      second: the same of the second step.
      why_first: the reductions that made it equal, or the lines by which it came to differ.
      why_second: the same of the second step.
    """

    path: str
    first: str
    second: str
    why_first: str
    why_second: str


@dataclasses.dataclass(frozen=True)
class ExplanationDiff:
    """In what two explanations differ: what is reduced, proved and found in one of them only.

    ``print`` it, or show it in a notebook. Lines of code may have moved: collectives are compared
    by kind and bytes, results and variables by path, findings by their rule.

    Attributes:
      names: of the two functions.
      reduced: the collectives, as written, of the first step only, and of the second.
      proofs: what is equal in one step only.
      findings: what is found in the first step only, and in the second.
    """

    names: tuple[str, str]
    reduced: tuple[tuple[Collective, ...], tuple[Collective, ...]]
    proofs: tuple[ProofChange, ...]
    findings: tuple[tuple[Finding, ...], tuple[Finding, ...]]

    def to_json(self, indent: int | None = None) -> str:
        """Returns all of it as JSON, for other programs to read.

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
                rows = tuple((c.kind, format_bytes(c.result_bytes), c.source) for c in collectives)
                yield Table(f"reduced in the {which} only:", ("kind", "bytes", "line"), rows)
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
    """Returns in what two explanations differ."""
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
    """Returns what only one of two sequences has, the order apart."""

    def missing(those: Sequence[_T], others: Sequence[_T]) -> Iterator[_T]:
        left = collections.Counter(map(key, others))
        for each in those:
            left[key(each)] -= 1
            if left[key(each)] < 0:
                yield each

    return tuple(missing(first, second)), tuple(missing(second, first))


def _proofs(explanation: Explained) -> dict[tuple[int, str], tuple[str, str]]:
    """Returns (letter, why) of the results of each run and the variables that it writes."""
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
