"""dj.check: raises if a step is probably wrong, for use in test suites."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from distjax.context.finding import Finding
from distjax.diagnostics.explain_step import lower_step
from distjax.diagnostics.notes import Notes
from distjax.errors import CheckError, message
from distjax.replica.user_names import function_name
from distjax.strategies.strategy import Strategy
from distjax.typing import PyTree


def check(
    fn: Callable[..., Any], /, *args: PyTree, strategy: Strategy | None = None, **kwargs: PyTree
) -> None:
    """Raises if anything about a step is probably wrong; runs and changes nothing.

    Meant for a test of your training step. A plain run raises errors and issues warnings;
    notes, which correct programs may cause as well, appear only here and in `dj.explain`.

    Args:
      fn: a function compiled by `dj.jit`; or a cross-replica function, which calls
        `strategy.run`; or, with `strategy`, a replica function.
      *args: its arguments, as in a call.
      strategy: the strategy whose replicas run ``fn``.
      **kwargs: its keyword arguments.

    Context: any, outside traces. Cost: one trace.

    Raises:
      CheckError: there are findings that no `dj.expect` declares as intended; lists each
        error, warning and note with its line and its fix.
      ContextError: called inside a trace, or ``fn`` would create variables.

    Example:
      >>> strategy = dj.VirtualStrategy(2)
      >>> def step(params, x):
      ...     return {"w": params["w"] - 0.1 * x}
      >>> x = strategy.distribute_values_from_function(lambda ctx: jnp.ones(3))
      >>> dj.check(step, {"w": jnp.ones(3)}, x, strategy=strategy)
      Traceback (most recent call last):
      distjax.errors.CheckError: step needs to be a step in which dj.check finds nothing...
    """
    notes = Notes(collects_findings=True)
    lower_step(fn, args, kwargs, strategy, notes, "check")
    found = [finding for finding in notes.findings if finding.expected is None]
    if found:
        raise CheckError(_text(function_name(fn), found), tuple(found))


_LEVELS = ("error", "warning", "note")


def _text(name: str, found: Sequence[Finding]) -> str:
    found = sorted(found, key=lambda finding: _LEVELS.index(finding.level))
    counts = Counter(finding.level for finding in found)
    text = message(
        f"{name} needs to be a step in which dj.check finds nothing",
        got=", ".join(f"{n} {level}{'s' if n > 1 else ''}" for level, n in counts.items()),
        why="such steps train, but not as one device with the whole batch would",
        fix="as each finding says; or, where it is meant: with dj.expect(reason)",
    )
    return "\n".join([text, *map(_describe, found)])


def _describe(finding: Finding) -> str:
    head = f"{finding.level}: {finding.rule}, at {finding.source}"
    return textwrap.indent(f"{head}\n{textwrap.indent(finding.text, '  ')}", "  ")
