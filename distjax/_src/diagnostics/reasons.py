"""Why a value of a replica function is equal on all replicas, or which lines made it differ.

Told from the facts of `lint`, with what it is to the value of one replica with the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from distjax._src.context import reason_in
from distjax._src.jax_compat import Jaxpr, JaxprEqn, Literal, Var
from distjax._src.lint.facts import EQUAL, MEAN, RATIO, SHARE, TOTAL, Fact, Site
from distjax._src.replica.analysis import MERGE_NAME, Analysis, is_declared_equal
from distjax._src.replica.global_value import GlobalValue
from distjax._src.replica.trace import Given, TracedRun
from distjax._src.variables.state import variable_p


def reasons_of(run: TracedRun, env: Mapping[Any, Fact]) -> list[tuple[str, bool, str]]:
    """Returns of each result and written variable its name, whether it may differ, and why.

    Args:
      run: a replica function that was traced.
      env: the fact of each of its values.
    """
    given, traced = run.given, run.traced
    named = [*traced.result.paths, *(f"variable {v.name!r}" for v in traced.written)]
    reasons = _Reasons(traced.jaxpr, env, run.topology.axis_name, given.paths)
    outs = zip(named, traced.jaxpr.outvars, (*run.results, *run.finals), strict=False)
    return [
        (name, x.varying, reasons.explain(atom, x.varying) + _dependence(env, atom, x, given))
        for name, atom, x in outs
    ]


def _dependence(env: Mapping[Any, Fact], atom: Var | Literal, x: GlobalValue, given: Given) -> str:
    """Returns what a value is to that of one replica with the whole batch; "": not known."""
    fact = EQUAL if isinstance(atom, Literal) else env[atom]
    if fact.is_kind(SHARE, TOTAL):
        return " (a share: their sum is what one replica computes)" if fact.differs else ""
    if fact.is_kind(MEAN):
        told = "a share, R times too large: their mean is" if fact.differs else "R times"
        return f" ({told} what one replica computes)"
    if fact.differs and fact.is_kind(RATIO):
        return " (of its own rows, not linear: neither sum nor mean is what one replica computes)"
    own = {v.array.shape[1] for v in given.values if v.varying and v.array.ndim > 1}
    equal = {n for v in given.values if not v.varying for n in jnp.shape(v.array)}
    is_rows = x.varying and x.array.ndim > 1 and x.array.shape[1] in own - equal - {1}
    return " (rows of the batch)" if is_rows else ""


#: The most lines of a chain to show; the middle is cut, since its two ends matter most.
_MOST_LINES = 6


class _Reasons:
    """Traces values of a replica function back to where they come from.

    Args:
      jaxpr: the function's code.
      env: the fact of each value.
      axis_name: the name of the replica axis.
      arguments: the user's paths of its inputs.
    """

    def __init__(
        self, jaxpr: Jaxpr, env: Mapping[Any, Fact], axis_name: str, arguments: Sequence[str]
    ):
        self._env, self._analysis = env, Analysis(axis_name)
        self._made_by: dict[Any, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self._arguments: dict[Any, str] = dict(zip(jaxpr.invars, arguments, strict=True))

    def explain(self, atom: Var | Literal, differs: bool) -> str:
        """Returns why `atom` is equal, or which lines made it differ."""
        if isinstance(atom, Literal):
            return "a number in the code"
        return self._why_different(atom) if differs else self._why_equal(atom)

    def _why_different(self, atom: Var | Literal) -> str:
        lines: list[str] = []
        while atom in self._made_by:
            eqn = self._made_by[atom]
            if eqn.primitive is variable_p:
                break
            line = Site(eqn, ()).source
            if line not in lines:
                lines.append(line)
            differing = [v for v in eqn.invars if self._differs(v)]
            if not differing:
                origin = "the replica's number" if eqn.primitive.name == "axis_index" else ""
                return " -> ".join(filter(None, (origin, *_shorten(lines[::-1]))))
            atom = differing[0]
        return " -> ".join((f"{self._name(atom)}, a value per replica", *_shorten(lines[::-1])))

    def _differs(self, atom: Var | Literal) -> bool:
        return not isinstance(atom, Literal) and atom in self._env and self._env[atom].differs

    def _why_equal(self, atom: Var | Literal) -> str:
        """Finds the last reductions on all paths to the value."""
        lines: dict[str, None] = {}
        ahead, seen = [atom], set()
        while ahead:
            atom = ahead.pop()
            eqn = self._made_by.get(atom)
            if eqn is None or id(eqn) in seen:
                continue
            seen.add(id(eqn))
            if eqn.primitive.name == MERGE_NAME:
                lines[f"merge_call at {Site(eqn, ()).source}"] = None
            elif self._analysis.over_replicas(eqn):
                lines[f"{eqn.primitive.name} at {Site(eqn, ()).source}"] = None
            else:
                if is_declared_equal(eqn):
                    reason = reason_in(str(eqn.source_info.name_stack))
                    lines[f"pure_callback at {Site(eqn, ()).source}: {reason}"] = None
                ahead.extend(v for v in eqn.invars if not isinstance(v, Literal))
        return ", ".join(_shorten(list(lines))) or "made of equal values only"

    def _name(self, atom: Var | Literal) -> str:
        if atom in self._arguments:
            return self._arguments[atom]
        eqn = self._made_by.get(atom)
        variable = eqn.params["variable"]() if eqn is not None else None
        return f"variable {variable.name!r}" if variable is not None else "a constant"


def _shorten(lines: list[str]) -> list[str]:
    if len(lines) <= _MOST_LINES:
        return lines
    half = _MOST_LINES // 2
    return [*lines[:half], f"({len(lines) - 2 * half} more)", *lines[-half:]]
