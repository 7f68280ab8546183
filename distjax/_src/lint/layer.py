"""The lint: hears of every trace, examines it, and reports what is probably wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from distjax._src import hooks, jax_compat
from distjax._src.context import reason_in
from distjax._src.jax_compat import Jaxpr, JaxprEqn, Literal, Var
from distjax._src.lint.between_runs import (
    Feedback,
    recall,
    remember,
    remember_equal,
    remember_own,
)
from distjax._src.lint.examine import (
    as_if_several,
    check_state,
    examine,
    find_unequal_start,
    report_lone_updates,
)
from distjax._src.lint.facts import DERIVATIVE, DIFFERS, EQUAL, MEAN, SHARE, TOTAL, Fact, Site
from distjax._src.lint.findings import UNREDUCIBLE
from distjax._src.placement.rows import is_batch
from distjax._src.replica.analysis import MERGE_NAME, Analysis, is_declared_equal
from distjax._src.replica.global_value import GlobalValue
from distjax._src.replica.trace import Given, TracedRun
from distjax._src.typing import PyTree
from distjax._src.variables.state import PARTS_OF, variable_p
from distjax.errors import DivergenceError


def on_call(
    memory: dict[Any, Any],
    fn: object,
    names: tuple[str, Sequence[str]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Callable[[PyTree, Mapping[Any, Any]], None]:
    """Compares the arguments of a second call with the results of the first."""
    _, feedback = memory.get(id(fn), (fn, None))
    if feedback is not None:
        feedback.compare(args, kwargs)
        return lambda result, known: feedback.remember(result)  # what is known is told once
    first = Feedback(*names, args, kwargs)
    memory[id(fn)] = fn, first
    return lambda result, known: first.remember(result, known.get(describe, ()))


def on_traced(run: TracedRun) -> None:
    """Examines a replica function that has been traced, and reports what it finds."""
    for variable in run.unequal:
        find_unequal_start(variable)
    facts = _tell_findings(run)
    if run.topology.num_replicas == 1:  # they would differ if there were more
        pairs = zip(run.values, facts, strict=True)
        remember_own([v for v, fact in pairs if fact.differs])
        if hooks.is_dry_run():
            remember_equal(run.values)


def on_stand_ins(arrays: Sequence[Any], given: Sequence[Any]) -> None:
    """Carries facts over to the arrays of a trace."""
    known = [(recall(x) or DIFFERS).having(batch=True) if is_batch(x) else recall(x) for x in given]
    remember(arrays, known)


def describe(leaves: Sequence[Any]) -> Sequence[Any]:
    """Returns the facts of the results."""
    return list(map(recall, leaves))


def _tell_findings(run: TracedRun) -> list[Fact]:
    """Reports mistakes, tells why values are equal or not; returns a fact per result."""
    given, traced, results, topology = run.given, run.traced, run.results, run.topology
    is_alone = topology.num_replicas == 1
    count = run.num_own
    env = examine(traced.jaxpr, traced.written, given, topology, own=count, results=len(results))
    outvars = traced.jaxpr.outvars[: len(results)]
    facts = [EQUAL if isinstance(v, jax_compat.Literal) else env[v] for v in outvars]
    inputs = [env[v] for v in traced.jaxpr.invars]
    if is_alone:
        given = given._replace(values=as_if_several(given.values, inputs))
        results = as_if_several(results, facts)
        run = run._replace(given=given, results=results)
    _tell_why(run, env)
    known, meant = (inputs, facts), run.expectations
    if not check_state(run.fn, given, traced.result, results, known, meant, is_alone=is_alone):
        paths = traced.result.paths[:count]
        if run.is_first_of_several:
            paths = [path.removeprefix("[0]") for path in paths]
        report_lone_updates(facts[:count], paths, results[:count], given, meant)
    return facts


def _tell_why(run: TracedRun, env: dict[Any, Any]) -> None:
    """Tells those that listen why results and variables are equal, or what made them differ."""
    if not hooks.is_dry_run():
        return
    given, traced = run.given, run.traced
    named = [*traced.result.paths, *(f"variable {v.name!r}" for v in traced.written)]
    reasons = Reasons(traced.jaxpr, env, run.topology.axis_name, given.paths)
    outs = zip(named, traced.jaxpr.outvars, (*run.results, *run.finals), strict=False)
    why = [
        (name, x.varying, reasons.explain(atom, x.varying) + _dependence(env, atom, x, given))
        for name, atom, x in outs
    ]
    hooks.tell(hooks.on_proved, run, why)
    if run.topology.num_replicas == 1:  # the emitter tells of more; what more refuse is not told of
        with contextlib.suppress(DivergenceError):
            varying = [env[v].differs for v in traced.jaxpr.invars]
            hooks.tell(hooks.on_segment, traced.jaxpr, varying, run.topology)


def _dependence(env: Mapping[Any, Fact], atom: Var | Literal, x: GlobalValue, given: Given) -> str:
    """Returns what a value is to that of one replica with the whole batch; "": not known."""
    fact = EQUAL if isinstance(atom, Literal) else env[atom]
    if fact.is_kind(SHARE, TOTAL):
        return " (a share: their sum is what one replica computes)" if fact.differs else ""
    if fact.is_kind(MEAN, DERIVATIVE):
        told = "a share, R times too large: their mean is" if fact.differs else "R times"
        return f" ({told} what one replica computes)"
    if fact.differs and fact.is_kind(*UNREDUCIBLE):
        return " (of its own rows, not linear: neither sum nor mean is what one replica computes)"
    own = {v.array.shape[1] for v in given.values if v.varying and v.array.ndim > 1}
    equal = {n for v in given.values if not v.varying for n in jnp.shape(v.array)}
    is_rows = x.varying and x.array.ndim > 1 and x.array.shape[1] in own - equal - {1}
    return " (rows of the batch)" if is_rows else ""


# -- why a value is equal on every replica or not --------------------------------

#: The most lines of a chain to show; the middle is cut, since its two ends matter most.
_MOST_LINES = 6


class Reasons:
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
            if PARTS_OF.search(str(eqn.source_info.name_stack)):
                continue  # it was equal before the step
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


# -- what is registered ----------------------------------------------------------

hooks.on_call.append(on_call)
hooks.on_traced.append(on_traced)
hooks.on_stand_ins.append(on_stand_ins)
hooks.on_lone_value.append(remember_own)  # so that one replica is judged as several
hooks.describe.append(describe)
