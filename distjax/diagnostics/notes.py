"""Notes: the observer that records what the traces of one explanation prove."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import jax

from distjax import jax_compat, user_lines
from distjax.context.finding import Finding
from distjax.context.observer import Proof, ProvesLocality
from distjax.diagnostics import sources
from distjax.diagnostics.equal_reductions import equal_reductions
from distjax.placement.topology import Topology


@dataclasses.dataclass(frozen=True)
class RunProof:
    """What was proved about one `run` of a replica function.

    Attributes:
      function: its name.
      num_replicas: R.
      source: the line of the call.
      arguments: pairs of a path and "T" (per replica) or "M" (equal on every replica).
      results: the same for its array results.
      why: for each result and each variable that it writes, the path, the letter and the
        reason: the reductions that made it equal, or the lines that made it differ.
    """

    function: str
    num_replicas: int
    source: str
    arguments: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    why: tuple[tuple[str, str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class EqualReduction:
    """A reduction of a value that is already equal on every replica.

    Attributes:
      what: the primitive, or "reduce(SUM)".
      source: the user's line.
    """

    what: str
    source: str


class Notes:
    """The observer of `dj.explain` and `dj.check` (see `distjax.context.observer`).

    Duplicates are recorded once, since JAX traces some bodies more than once.

    Args:
      collects_findings: whether findings are only recorded instead of raised or warned about.
    """

    def __init__(self, collects_findings: bool = False) -> None:
        self.collects_findings = collects_findings
        self.findings: dict[Finding, None] = {}
        self.runs: dict[RunProof, None] = {}
        self.equal_reductions: dict[EqualReduction, None] = {}
        self.reads: Sequence[Any] = ()
        self.writes: Sequence[Any] = ()
        self.results: tuple[tuple[str, str], ...] = ()
        self.merge_lines: list[str] = []
        self._open_merges: list[int] = []

    def on_program(
        self, reads: Sequence[Any], writes: Sequence[Any], results: Sequence[Proof]
    ) -> None:
        """Records the variables and results of the whole program."""
        self.reads, self.writes, self.results = reads, writes, _letters(results)

    def on_run(
        self,
        topology: Topology,
        name: str,
        args: Sequence[Proof],
        results: Sequence[Proof],
        why: Sequence[tuple[str, bool, str]],
    ) -> None:
        """Records what was proved about one replica function."""
        line, count = self._calling_line(), topology.num_replicas
        reasons = tuple((path, "T" if varying else "M", text) for path, varying, text in why)
        self.runs[RunProof(name, count, line, _letters(args), _letters(results), reasons)] = None

    def on_segment(
        self, jaxpr: jax_compat.Jaxpr, varying: Sequence[bool], analysis: ProvesLocality
    ) -> None:
        """Records reductions of equal values in replica code."""
        for eqn in equal_reductions(jaxpr, varying, analysis):
            self._note_reduction(eqn.primitive.name, user_lines.source_line(eqn))

    @contextlib.contextmanager
    def on_merge(self, eqn: jax_compat.JaxprEqn) -> Generator[None]:
        """Stages a merge in a named scope, from which its line is found later."""
        index = len(self.merge_lines)
        self.merge_lines.append(user_lines.source_line(eqn))
        self._open_merges.append(index)
        with jax.named_scope(sources.merge_scope(index)):
            yield
        self._open_merges.pop()

    def on_equal_reduction(self, what: str) -> None:
        """Records a reduction of an equal value in cross-replica code."""
        self._note_reduction(what, self._calling_line())

    def on_finding(self, finding: Finding) -> None:
        """Records a finding."""
        self.findings[finding] = None

    def _note_reduction(self, what: str, source: str) -> None:
        self.equal_reductions[EqualReduction(what, source)] = None

    def _calling_line(self) -> str:
        scopes = "/".join(map(sources.merge_scope, self._open_merges))
        frames = list(user_lines.calling_frames())
        return sources.user_line(frames, scopes, self.merge_lines) or user_lines.UNKNOWN


def _letters(proofs: Sequence[Proof]) -> tuple[tuple[str, str], ...]:
    return tuple((path, "T" if varying else "M") for path, varying in proofs)
