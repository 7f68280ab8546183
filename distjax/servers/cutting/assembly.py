"""Assembles a plan: the stages of a replica trace become programs, its values become slots."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from distjax import jax_compat
from distjax.context.contracts import StrategyLike
from distjax.errors import StrategyMismatchError, message
from distjax.jax_compat import Jaxpr, Literal
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology, abstract_topology
from distjax.placement.transfer import transfer
from distjax.replica.emit import JaxprEmitter
from distjax.replica.replica_trace import ReplicaTrace
from distjax.servers.cutting.answers import join_answers
from distjax.servers.cutting.code import (
    NOTHING_RUN,
    Code,
    NamedCode,
    off_devices,
    trace_code,
)
from distjax.servers.cutting.least_bytes import (
    equations_at_worker,
    move_to_worker,
    opened,
    slices_of_operands,
)
from distjax.servers.cutting.localities import Localities, find_localities
from distjax.servers.cutting.owners import ServerShare, cut_by_owner
from distjax.servers.cutting.shipping import require_small
from distjax.servers.cutting.staging import (
    TracedStage,
    open_calls,
    read_parts,
    split_stages,
)
from distjax.servers.cutting.update import Update, trace_update
from distjax.servers.extended import ParameterServerExtended
from distjax.servers.plan import Plan, Push, Stage
from distjax.servers.server_storage import parts_of
from distjax.variables.state import find_variables
from distjax.variables.variable import Variable


@dataclasses.dataclass(frozen=True)
class ConstantResult:
    """The name of a result that is a constant: the number of the result."""

    number: int


@dataclasses.dataclass(frozen=True)
class CutStage:
    """A stage whose merges are cut by server; its values still have their names in the trace.

    Attributes:
      traced: its equations and merges.
      joined: what the worker computes first, from the answers of several servers.
      moved: the part of its merges that runs at the worker.
      shares: the parts of its merges that run at servers.
      later: names of values that later stages or the results need.
    """

    traced: TracedStage
    joined: NamedCode
    moved: NamedCode
    shares: list[ServerShare]
    later: set[Any]


def assemble_plan(
    name: str,
    traced: ReplicaTrace,
    args_varying: Sequence[bool],
    arg_names: tuple[str, ...],
    extended: ParameterServerExtended,
) -> Plan:
    """Returns the plan of a traced replica function.

    Args:
      name: its name, for the user.
      traced: its trace.
      args_varying: for each flat argument, whether it has a row for each replica.
      arg_names: for each flat argument, its name for the user.
      extended: the strategy's.

    Raises:
      MergeError, StrategyMismatchError: it cannot be cut.
    """
    topology = extended.topology
    jaxpr, consts = open_calls(traced.jaxpr, traced.consts, topology)
    localities = find_localities(jaxpr, consts, args_varying, topology)
    constants: dict[Any, Any] = dict(zip(jaxpr.constvars, map(off_devices, consts), strict=True))
    results = _normalize(jaxpr.outvars[: len(traced.result.leaves)], constants)
    stages = split_stages(jaxpr, results)
    used = _names(results).union(*map(_uses, stages))
    snapshot = {v: x for v, x in find_variables(jaxpr).items() if v in used}
    merged = (v for s in stages for m in s.merges for v in (*m.read, *m.written) if v is not None)
    variables = tuple(dict.fromkeys((*snapshot.values(), *merged)))
    for variable in variables:
        _require_own(variable, name, extended.strategy)
    reads, pulled = read_parts(snapshot)
    stages[0].eqns[:0] = reads

    slots: dict[Any, int] = collections.defaultdict(itertools.count().__next__)
    arguments = tuple(slots[v] for v in jaxpr.invars)
    pulls = tuple((slots[v], part.key) for v, part in pulled.items())
    cut = _cut_stages(name, stages, results, constants, localities, extended)
    programs = _Programs(name, jaxpr, constants, localities)
    made = tuple(programs.stage(number, stage, slots) for number, stage in enumerate(cut))
    require_small(name, programs.codes)
    return Plan(
        name=name,
        arguments=arguments,
        pulls=pulls,
        stages=made,
        results=tuple(slots[v] for v in results),
        rebuild=_rebuilder(traced.result.combine, results, localities),
        owners={part.key: part.server or 0 for v in variables for part in parts_of(v)},
        kept=tuple(v.stored for v in variables),
        varying=frozenset(slots[v] for v in localities.varying if v in slots),
        argument_names=arg_names,
    )


def _rebuilder(
    combine: Callable[[Sequence[Any]], Any], results: Sequence[Any], localities: Localities
) -> Callable[[Sequence[jax.Array]], Any]:
    """Returns the function that builds the user's results from a worker's arrays."""
    if localities.topology.num_replicas == 1:
        return combine
    is_varying = [v in localities.varying for v in results]
    return functools.partial(_rebuild, combine, is_varying, localities.topology)


def _rebuild(
    combine: Callable[[Sequence[Any]], Any],
    is_varying: Sequence[bool],
    topology: Topology,
    arrays: Sequence[jax.Array],
) -> Any:
    """Returns the results as values of the strategy, on its device."""
    arrays = [transfer(x, topology.mirrored) for x in arrays]
    pairs = zip(arrays, is_varying, strict=True)
    return combine([PerReplica(x, topology) if varying else x for x, varying in pairs])


def _normalize(atoms: Sequence[Any], constants: dict[Any, Any]) -> list[Any]:
    """Returns a name for each result; each constant result gets a new one."""
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
    localities: Localities,
    extended: ParameterServerExtended,
) -> list[CutStage]:
    """Returns the stages with their merges cut by server."""
    cut: list[CutStage] = []
    later, num_servers = _names(results), len(extended.servers)
    for stage in reversed(stages):
        joined, moved, shares = NOTHING_RUN, NOTHING_RUN, []
        if stage.merges:
            update = trace_update(stage.merges, constants, later, localities)
            update, joined = join_answers(update)
            moved, update = _move(update, extended.cut, num_servers)
            shares = cut_by_owner(update, name, num_servers)
        if joined.results:
            after = cut.pop() if cut else CutStage(TracedStage(), joined, NOTHING_RUN, [], later)
            cut.append(dataclasses.replace(after, joined=joined))
        cut.append(CutStage(stage, NOTHING_RUN, moved, shares, later.union(joined.operands)))
        later = later | _uses(stage)
    return cut[::-1]


def _move(update: Update, cut: str, num_servers: int) -> tuple[NamedCode, Update]:
    """Returns the part of an update that runs at the worker, and the rest."""
    if cut == "least_bytes":
        update = opened(update)
        return move_to_worker(update, equations_at_worker(update, num_servers))
    return move_to_worker(update, slices_of_operands(update))


class _Programs:
    """Makes the programs of one plan: names of the trace become slots of the worker.

    Attributes:
      codes: the code of all programs made so far.
    """

    def __init__(self, name: str, jaxpr: Jaxpr, constants: dict[Any, Any], localities: Localities):
        self._name, self._jaxpr, self._constants = name, jaxpr, constants
        self._localities, topology = localities, localities.topology
        if topology.num_replicas > 1:  # for the devices of any worker
            topology = abstract_topology(topology.num_replicas, topology.axis_name)
        self._emitter = JaxprEmitter(topology)
        self.codes: list[Code] = []

    def stage(self, number: int, cut: CutStage, slots: dict[Any, int]) -> Stage:
        """Returns one stage of the plan; new names get slots."""
        needed = cut.later.union(*(share.operands for share in cut.shares))
        made = [*cut.joined.results, *(v for e in cut.traced.eqns for v in e.outvars)]
        made += cut.moved.results
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
        """Returns the code that a worker runs in one stage, and the names of its operands."""
        eqns, joined, moved = cut.traced.eqns, cut.joined, cut.moved
        made = {v for e in eqns for v in e.outvars}
        used = dict.fromkeys(v for e in eqns for v in e.invars if not isinstance(v, Literal))
        fixed = [v for v in used if v in self._constants]
        ins = [v for v in used if v not in made and v not in self._constants]
        outs = [v for v in dict.fromkeys((*wanted, *moved.operands)) if v in made]
        part = jax_compat.new_jaxpr(self._jaxpr, (), [*fixed, *ins], outs, eqns)
        asked = (v for v in (*ins, *moved.operands) if v not in made and v not in joined.results)
        given = list(dict.fromkeys((*joined.operands, *asked)))

        def run(*arrays: jax.Array) -> list[Any]:
            env = {**self._constants, **dict(zip(given, arrays, strict=True))}
            _run(joined, env)
            inputs = [self._localities.value(v, env[v]) for v in (*fixed, *ins)]
            values = self._emitter.emit(part, (), inputs)
            env.update(zip(outs, map(self._localities.array, values), strict=True))
            _run(moved, env)
            return [env[v] for v in wanted]

        code = trace_code(run, [*map(self._localities.aval, given)])
        code = code.cut_to(range(len(wanted)))
        needed = [i for i, is_used in enumerate(code.used) if is_used]
        return code.taking(needed), [given[i] for i in needed]

    def _push(self, number: int, share: ServerShare, slots: dict[Any, int]) -> Push:
        return Push(
            server=share.server,
            operands=tuple(slots[v] for v in share.operands),
            takes=tuple(part.key for part in share.takes),
            writes=tuple(part.key for part in share.writes),
            answers=tuple(slots[v] for v in share.answers),
            program=share.code.as_program(f"{self._name} server {share.server}.{number}"),
        )


def _run(named: NamedCode, env: dict[Any, Any]) -> None:
    results = named.code(*(env[v] for v in named.operands))
    env.update(zip(named.results, results, strict=True))


def _require_own(variable: Variable, name: str, strategy: StrategyLike) -> None:
    if variable.strategy is strategy:
        return
    argument = variable.name if variable.name.isidentifier() else "variable"
    raise StrategyMismatchError(
        message(
            f"{name} needs variables of {strategy!r}",
            got=f"variable {variable.name!r} of {variable.strategy!r}",
            why="workers pull the values of variables from its servers, which do not have this one",
            fix="create it under `with strategy.scope():` of the strategy that runs the step; or "
            f"pass its value as an argument: args=({argument}.value,)",
        )
    )
