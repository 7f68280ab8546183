"""Assembling a plan: the stages of a replica trace as programs, their values as slots."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from distjax import jax_compat
from distjax.context.contracts import StrategyLike
from distjax.errors import StrategyMismatchError, message
from distjax.jax_compat import Jaxpr, Literal
from distjax.placement.topology import Topology
from distjax.replica.emit import JaxprEmitter
from distjax.replica.global_value import GlobalValue, as_user_value
from distjax.replica.run import ReplicaTrace
from distjax.servers.code import Code, aval_of_atom, off_devices, trace_code
from distjax.servers.extended import ParameterServerExtended
from distjax.servers.least_bytes import NOTHING_MOVED, Moved, move_to_worker
from distjax.servers.owners import ServerShare, cut_by_owner
from distjax.servers.placement import server_of
from distjax.servers.plan import Plan, Push, Stage
from distjax.servers.server_storage import key_of
from distjax.servers.shipping import require_small
from distjax.servers.staging import TracedStage, find_snapshot, open_calls, split_stages
from distjax.servers.update import trace_update
from distjax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class ConstantResult:
    """The name of a result that is a constant, by its number."""

    number: int


@dataclasses.dataclass(frozen=True)
class CutStage:
    """A stage whose merges are cut by server, its values still named as traces name them.

    Attributes:
      traced: its equations.
      moved: what of its merges runs at the worker.
      shares: what runs at servers.
      later: names of values that later stages or the results need.
    """

    traced: TracedStage
    moved: Moved
    shares: list[ServerShare]
    later: set[Any]


def assemble_plan(name: str, traced: ReplicaTrace, extended: ParameterServerExtended) -> Plan:
    """Returns the plan of a traced replica function.

    Args:
      name: the user's name of it.
      traced: its trace.
      extended: of the strategy.

    Raises:
      MergeError, StrategyMismatchError: it cannot be cut.
    """
    jaxpr, consts = open_calls(traced.jaxpr, traced.consts, extended.topology)
    constants: dict[Any, Any] = dict(zip(jaxpr.constvars, map(off_devices, consts), strict=True))
    results = _normalise(jaxpr.outvars[: len(traced.result.leaves)], constants)
    stages = split_stages(jaxpr, results)
    used = _names(results).union(*map(_uses, stages))
    pulled = {v: x for v, x in find_snapshot(jaxpr).items() if v in used}
    merged = (v for s in stages for m in s.merges for v in (*m.read, *m.written) if v is not None)
    variables = tuple(dict.fromkeys((*pulled.values(), *merged)))
    for variable in variables:
        _require_own(variable, name, extended.strategy)

    slots: dict[Any, int] = collections.defaultdict(itertools.count().__next__)
    arguments = tuple(slots[v] for v in jaxpr.invars)
    pulls = tuple((slots[v], key_of(x)) for v, x in pulled.items())
    cut = _cut_stages(name, stages, results, constants, extended)
    programs = _Programs(name, jaxpr, constants, extended.topology)
    made = tuple(programs.stage(number, stage, slots) for number, stage in enumerate(cut))
    require_small(name, programs.codes)
    return Plan(
        name=name,
        arguments=arguments,
        pulls=pulls,
        stages=made,
        results=tuple(slots[v] for v in results),
        rebuild=traced.result.combine,
        owners={key_of(v): server_of(v) or 0 for v in variables},
        is_read_only=not any(push.writes for stage in made for push in stage.pushes),
    )


def _normalise(atoms: Sequence[Any], constants: dict[Any, Any]) -> list[Any]:
    """Returns a name for each result; one that is a constant gets one of its own."""
    names: list[Any] = []
    for number, atom in enumerate(atoms):
        is_constant = isinstance(atom, Literal) or atom in constants
        name = ConstantResult(number) if is_constant else atom
        if is_constant:
            constants[name] = atom.val if isinstance(atom, Literal) else constants[atom]
        names.append(name)
    return names


def _names(atoms: Iterable[Any]) -> set[Any]:
    return {a for a in atoms if not isinstance(a, Literal)}


def _uses(stage: TracedStage) -> set[Any]:
    """Returns the names that a stage computes with, or sends."""
    eqns = (v for e in stage.eqns for v in e.invars)
    return _names(eqns) | _names(a for m in stage.merges for a in m.arguments)


def _cut_stages(
    name: str,
    stages: Sequence[TracedStage],
    results: Sequence[Any],
    constants: dict[Any, Any],
    extended: ParameterServerExtended,
) -> list[CutStage]:
    """Returns the stages with their merges cut by server."""
    cut, later = [], _names(results)
    for stage in reversed(stages):
        moved, shares = NOTHING_MOVED, []
        if stage.merges:
            update = trace_update(stage.merges, constants, later, extended.topology)
            if extended.cut == "least_bytes":
                moved, update = move_to_worker(update, len(extended.servers))
            shares = cut_by_owner(update, name, len(extended.servers))
        cut.append(CutStage(stage, moved, shares, later))
        later = later | _uses(stage)
    return cut[::-1]


class _Programs:
    """Makes the programs of one plan: values that traces name become slots of the worker.

    Attributes:
      codes: those that it has made.
    """

    def __init__(self, name: str, jaxpr: Jaxpr, constants: dict[Any, Any], topology: Topology):
        self._name, self._jaxpr, self._constants = name, jaxpr, constants
        self._emitter = JaxprEmitter(topology)
        self.codes: list[Code] = []

    def stage(self, number: int, cut: CutStage, slots: dict[Any, int]) -> Stage:
        """Returns one stage; names that are new get slots."""
        needed = cut.later.union(*(share.operands for share in cut.shares))
        made = [*(v for e in cut.traced.eqns for v in e.outvars), *cut.moved.results]
        if number == 0:
            made += [name for name in self._constants if isinstance(name, ConstantResult)]
        wanted = [v for v in made if v in needed]
        code, operands = self._worker_code(cut, wanted)
        self.codes += [code, *(share.code for share in cut.shares)]
        return Stage(
            operands=tuple(slots[v] for v in operands),
            results=tuple(slots[v] for v in wanted),
            program=code.as_program(f"{self._name} worker {number}"),
            pushes=tuple(self._push(number, share, slots) for share in cut.shares),
        )

    def _worker_code(self, cut: CutStage, wanted: Sequence[Any]) -> tuple[Code, list[Any]]:
        """Returns what a worker computes in one stage, and from what."""
        eqns, moved = cut.traced.eqns, cut.moved
        made = {v for e in eqns for v in e.outvars}
        used = dict.fromkeys(v for e in eqns for v in e.invars if not isinstance(v, Literal))
        fixed = [v for v in used if v in self._constants]
        ins = [v for v in used if v not in made and v not in self._constants]
        outs = [v for v in dict.fromkeys((*wanted, *moved.operands)) if v in made]
        part = jax_compat.new_jaxpr(self._jaxpr, (), [*fixed, *ins], outs, eqns)
        given = list(dict.fromkeys((*ins, *(v for v in moved.operands if v not in made))))

        def run(*arrays: jax.Array) -> list[Any]:
            env = {**self._constants, **dict(zip(given, arrays, strict=True))}
            inputs = [GlobalValue(env[v], False) for v in (*fixed, *ins)]
            values = self._emitter.emit(part, (), inputs)
            topology = self._emitter.topology
            env.update((v, as_user_value(x, topology)) for v, x in zip(outs, values, strict=True))
            env.update(
                zip(moved.results, moved.code(*(env[v] for v in moved.operands)), strict=True)
            )
            return [env[v] for v in wanted]

        code = trace_code(run, [aval_of_atom(v) for v in given])
        code = code.cut_to(range(len(wanted)))
        needed = [i for i, is_used in enumerate(code.used) if is_used]
        return code.taking(needed), [given[i] for i in needed]

    def _push(self, number: int, share: ServerShare, slots: dict[Any, int]) -> Push:
        return Push(
            server=share.server,
            operands=tuple(slots[v] for v in share.operands),
            takes=tuple(map(key_of, share.takes)),
            writes=tuple(map(key_of, share.writes)),
            answers=tuple(slots[v] for v in share.answers),
            program=share.code.as_program(f"{self._name} server {share.server}.{number}"),
        )


def _require_own(variable: Variable, name: str, strategy: StrategyLike) -> None:
    if variable.strategy is strategy:
        return
    raise StrategyMismatchError(
        message(
            f"{name} needs variables of {strategy!r}",
            got=f"variable {variable.name!r} of {variable.strategy!r}",
            why="workers pull the values of variables from its servers, which do not have this one",
            fix="create it under `with strategy.scope():` of the strategy that runs the step; or "
            f"pass its value as an argument: args=({variable.name}.value,)",
        )
    )
