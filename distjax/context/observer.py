"""Observer: receives what a trace proves, while it is being made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from distjax import jax_compat
from distjax.placement.topology import Topology


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something about a step that is probably wrong.

    Attributes:
      level: "error", "warning" or "note".
      rule: the kind of mistake, in a few words.
      text: what was expected and found, why it matters, and the fix.
      source: the user's line, "file:line (function)".
      expected: the reason given through `dj.expect`, or None.
    """

    level: str
    rule: str
    text: str
    source: str
    expected: str | None = None


#: A path in the user's tree, and whether the value there may vary per replica (T).
Proof = tuple[str, bool]


class Observer(Protocol):
    """Watches traces from a frame on the stack; see `frames.observer`.

    Traces made only for shapes are not reported.

    Attributes:
      collects_findings: whether findings are collected instead of raised or warned of.
    """

    collects_findings: bool

    def on_program(
        self, reads: Sequence[Any], writes: Sequence[Any], results: Sequence[Proof]
    ) -> None:
        """A cross-replica function was traced: its variables and its array results."""
        ...

    def on_run(
        self,
        topology: Topology,
        name: str,
        args: Sequence[Proof],
        results: Sequence[Proof],
        why: Sequence[tuple[str, bool, str]],
    ) -> None:
        """A replica function was traced and analyzed; `why` explains its results."""
        ...

    def on_segment(
        self, jaxpr: jax_compat.Jaxpr, varying: Sequence[bool], topology: Topology
    ) -> None:
        """A merge-free run of replica code is emitted; `varying` describes its inputs."""
        ...

    def on_merge(self, eqn: jax_compat.JaxprEqn) -> AbstractContextManager[Any]:
        """A merge is about to be emitted, inside the returned context."""
        ...

    def on_equal_reduction(self, what: str) -> None:
        """Cross-replica code reduces a value that is equal on every replica."""
        ...

    def on_finding(self, finding: Finding) -> None:
        """Something is probably wrong."""
        ...
