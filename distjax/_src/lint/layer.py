"""The lint: hears of every trace, examines it, and reports what is probably wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distjax._src import hooks, jax_compat
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
from distjax._src.lint.facts import EQUAL, Fact
from distjax._src.replica.trace import TracedRun
from distjax._src.typing import PyTree
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
    remember(arrays, list(map(recall, given)))


def describe(leaves: Sequence[Any]) -> Sequence[Any]:
    """Returns the facts of the results."""
    return list(map(recall, leaves))


def _tell_findings(run: TracedRun) -> list[Fact]:
    """Reports mistakes, tells what is known of values; returns a fact per result."""
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
    _tell_facts(run, env)
    known, meant = (inputs, facts), run.expectations
    if not check_state(run.fn, given, traced.result, results, known, meant, is_alone=is_alone):
        paths = traced.result.paths[:count]
        if run.is_first_of_several:
            paths = [path.removeprefix("[0]") for path in paths]
        report_lone_updates(facts[:count], paths, results[:count], given, meant)
    return facts


def _tell_facts(run: TracedRun, env: dict[Any, Any]) -> None:
    """Tells those that explain a step what is known of its values."""
    if not hooks.is_dry_run():
        return
    hooks.tell(hooks.on_examined, run, env)
    if run.topology.num_replicas == 1:  # the emitter tells of more; what more refuse is not told of
        with contextlib.suppress(DivergenceError):
            varying = [env[v].differs for v in run.traced.jaxpr.invars]
            hooks.tell(hooks.on_segment, run.traced.jaxpr, varying, run.topology)


# -- what is registered ----------------------------------------------------------

hooks.on_call.append(on_call)
hooks.on_traced.append(on_traced)
hooks.on_stand_ins.append(on_stand_ins)
hooks.on_lone_value.append(remember_own)  # so that one replica is judged as several
hooks.describe.append(describe)
