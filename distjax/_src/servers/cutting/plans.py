"""From the user's replica function to a plan, once per function and signature."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np

from distjax._src import jax_compat, user_mesh
from distjax._src.context import StrategyLike, frames, without_expectations
from distjax._src.jax_compat import Jaxpr, Literal
from distjax._src.lint.examine import examine
from distjax._src.objects.plain_objects import Surroundings
from distjax._src.objects.reached import Reached
from distjax._src.objects.stateful import has_objects, is_stateful
from distjax._src.placement import (
    PerReplica,
    Topology,
    abstract_topology,
    require_same_topology,
    transfer,
)
from distjax._src.program.discovery import signature_of
from distjax._src.program.functions import FunctionCache, record_new_function
from distjax._src.replica.arguments import (
    PartitionedTree,
    function_name,
    is_array,
    mark_modules,
    mark_static,
    positional_names,
    require_call,
    user_path,
)
from distjax._src.replica.emit import JaxprEmitter
from distjax._src.replica.global_value import GlobalValue
from distjax._src.replica.trace import Given, ReplicaTrace, trace_replica
from distjax._src.servers.cutting.code import (
    NOTHING_RUN,
    Code,
    NamedCode,
    off_devices,
    require_small,
    trace_code,
    values_of,
)
from distjax._src.servers.cutting.stages import (
    Localities,
    TracedStage,
    cut_by_owner,
    equations_at_worker,
    find_localities,
    join_answers,
    move_to_worker,
    open_calls,
    read_parts,
    slices_of_operands,
    split_stages,
    trace_update,
)
from distjax._src.servers.plan import Push, Stage, StepPlan
from distjax._src.servers.storage import parts_of
from distjax._src.typing import ArrayLike, DTypeLike, PyTree
from distjax._src.variables.conversion import is_number
from distjax._src.variables.state import TraceState, find_variables
from distjax._src.variables.variable import Variable
from distjax.errors import ContextError, StrategyMismatchError, message, require

# -- tracing ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Cuts:
    """What one function was cut into.

    Attributes:
      confirm_reused: called when the same function comes again: it is not made anew for each call.
      reached: the objects that the function used, and how it came to them.
      plans: by signature.
      by_kinds: (plan, dtypes of the arguments) by a key that is quick to compute; only for
        arguments whose leaves are all arrays and numbers.
    """

    confirm_reused: Callable[[], None]
    reached: Reached = dataclasses.field(default_factory=Reached)
    plans: dict[Hashable, StepPlan] = dataclasses.field(default_factory=dict)
    by_kinds: dict[Hashable, tuple[StepPlan, tuple[Any, ...]]] = dataclasses.field(
        default_factory=dict
    )

    def forget(self) -> None:
        """Forgets everything: the function would reach other objects now."""
        self.plans.clear()
        self.by_kinds.clear()
        self.reached.forget()


class Cutter:
    """Cuts the steps of a strategy, each once per function and signature; in one of two ways."""

    def __init__(
        self,
        topology: Topology,
        num_servers: int,
        cut: str,
        find_strategy: Callable[[], StrategyLike],
    ):
        self.topology, self.num_servers, self.way = topology, num_servers, cut
        self._find_strategy = find_strategy
        self._cuts = FunctionCache(lambda fn: _Cuts(record_new_function(fn(), self.strategy)))
        self._tracing = threading.RLock()

    @property
    def strategy(self) -> StrategyLike:
        """The strategy, whose variables a step may use."""
        return self._find_strategy()

    def cut(
        self, fn: Callable[..., Any], args: Sequence[PyTree], kwargs: dict[str, PyTree] | None
    ) -> tuple[StepPlan, list[jax.Array | np.ndarray]]:
        """Returns the plan of a replica function, and its flat arguments; nothing is run."""
        given, named = require_call(fn, args, kwargs, "schedule")
        cuts: _Cuts = self._cuts.get(fn)
        if cuts.plans:
            cuts.confirm_reused()
        if not cuts.reached.is_the_same():
            cuts.forget()
        leaves, treedef = jax.tree.flatten((given, named))
        kinds = tuple(map(_kind_of, leaves))
        key = treedef, kinds, jax_compat.trace_context()
        found = cuts.by_kinds.get(key)
        if found is None:
            plan, flat = self._look_up(fn, given, named, cuts)
            if len(flat) == len(leaves) and None not in kinds:
                cuts.by_kinds[key] = plan, tuple(x.dtype for x in flat)
            return plan, flat
        plan, dtypes = found
        return plan, [_as_flat(x, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]

    def _look_up(
        self,
        fn: Callable[..., Any],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        cuts: _Cuts,
    ) -> tuple[StepPlan, list[jax.Array | np.ndarray]]:
        """Returns the plan for any arguments, cut now if it is new, and the flat arguments."""
        if not cuts.plans:  # at the first call only, as in other strategies
            _require_no_objects(fn, args, kwargs)
        names = positional_names(fn)
        marked = mark_modules((args, kwargs), tuple(names))
        tree = mark_static(without_expectations(*marked), names)
        key = signature_of(tree), jax_compat.trace_context()
        with self._tracing:
            plan = cuts.plans.get(key)
            if plan is None:
                plan = cuts.plans[key] = self._trace(fn, *tree, reached=cuts.reached)
        return plan, [_as_flat(x, jax_compat.aval_of(x).dtype) for x in jax.tree.leaves(tree)]

    @user_mesh.ignores_user_mesh
    def _trace(
        self,
        fn: Callable[..., Any],
        args: tuple[PyTree, ...],
        kwargs: dict[str, PyTree],
        reached: Reached,
    ) -> StepPlan:
        """Traces a step and cuts it; records what it reached."""
        _require_outside_traces(fn)
        partitioned = PartitionedTree(
            (args, kwargs), lambda leaf: is_array(leaf) or is_number(leaf)
        )
        names = positional_names(fn)
        values = self._values_of(fn, partitioned, names)
        given = Given(function_name(fn), partitioned, names, values)
        outer = TraceState(
            local_view=False
        )  # no log of creations: variables are made outside of steps
        topology = self.topology
        around = Surroundings(fn, is_stateful, (args, kwargs), names)
        with around.watching():
            traced = trace_replica(self.strategy, fn, given, outer, topology)
        reached.record([fn, *around.objects], [*outer.read_order, *traced.written])
        around.require_no_leaks(traced.result.objects)
        around.require_inputs(traced.jaxpr, traced.consts)
        if topology.num_replicas > 1:
            count = len(traced.result.leaves)
            examine(traced.jaxpr, traced.written, given, topology, own=count, results=count)
        varying = [value.varying for value in values]
        return assemble_plan(function_name(fn), traced, varying, self)

    def _values_of(
        self,
        fn: Callable[..., Any],
        partitioned: PartitionedTree,
        names: Sequence[str],
    ) -> list[GlobalValue]:
        """Returns the arguments, each marked as varying per replica or not."""
        values: list[GlobalValue] = []
        for leaf, path in zip(partitioned.leaves, partitioned.paths, strict=True):
            is_varying = isinstance(leaf, PerReplica)
            if is_varying:
                _require_own_replicas(self.topology, fn, leaf, user_path(path, names))
            values.append(GlobalValue(leaf.stacked if is_varying else leaf, is_varying))
        return values


def _kind_of(leaf: object) -> Hashable:
    """Returns what a trace depends on in an argument; None if it may depend on more than that."""
    aval = getattr(leaf, "aval", None)
    if aval is not None:
        return aval.shape, aval.dtype, aval.weak_type
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype
    return type(leaf) if type(leaf) in (bool, int, float, complex) else None


def _as_flat(leaf: ArrayLike, dtype: DTypeLike) -> jax.Array | np.ndarray:
    """Returns an argument as an array of the dtype that the trace was made for."""
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf, dtype)


def _require_outside_traces(fn: Callable[..., Any]) -> None:
    require(
        not jax_compat.tracing(),
        f"{function_name(fn)} needs to be scheduled outside of traces",
        got=f"a call inside a trace, in {frames.current().name}",
        why="workers and servers run it by themselves, in several programs",
        fix="call it from ordinary code; a function under dj.jit can call it as it is",
        error=ContextError,
    )


def _require_no_objects(
    fn: Callable[..., Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> None:
    require(
        not has_objects(fn, args, kwargs),
        f"{function_name(fn)} needs parameters that are variables at the servers",
        got="a Flax module, optimizer or Rngs among its arguments, or captured by it",
        why="their arrays are in this process, and no server knows them",
        fix="under strategy.scope(): graphdef, params = nnx.split(model); variables = "
        "jax.tree.map(dj.Variable, params); in the step nnx.merge(graphdef, values)",
        error=StrategyMismatchError,
    )


def _require_own_replicas(
    topology: Topology, fn: Callable[..., Any], value: PerReplica, path: str
) -> None:
    if topology.num_replicas > 1:
        require_same_topology(value, topology, f"argument {path} of {function_name(fn)}")
        return
    raise StrategyMismatchError(
        message(
            f"{function_name(fn)} needs one value per argument",
            got="a PerReplica, of another strategy",
            why="a worker has one replica, and each closure one worker",
            fix="schedule a closure for each row: coordinator.schedule(step, args=(x,))",
        )
    )


# -- the stages of a trace become programs, its values become slots -----------


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
      pushes: the parts of its merges that run at servers; operands and answers are names.
      later: names of values that later stages or the results need.
    """

    traced: TracedStage
    joined: NamedCode
    moved: NamedCode
    pushes: list[Push]
    later: set[Any]


def assemble_plan(
    name: str,
    traced: ReplicaTrace,
    args_varying: Sequence[bool],
    cutter: Cutter,
) -> StepPlan:
    """Returns the plan of a traced replica function; `args_varying` have rows for replicas."""
    topology = cutter.topology
    jaxpr, consts = open_calls(traced.jaxpr, traced.consts, topology)
    localities = find_localities(jaxpr, consts, args_varying, topology)
    constants: dict[Any, Any] = dict(zip(jaxpr.constvars, map(off_devices, consts), strict=True))
    results = _normalize(jaxpr.outvars[: len(traced.result.leaves)], constants)
    stages = split_stages(jaxpr, results)
    used = set(results).union(*map(_uses, stages))
    snapshot = {v: x for v, x in find_variables(jaxpr).items() if v in used}
    merged = (v for s in stages for m in s.merges for v in (*m.read, *m.written) if v is not None)
    variables = tuple(dict.fromkeys((*snapshot.values(), *merged)))
    for variable in variables:
        _require_own(variable, name, cutter.strategy)
    reads, pulled = read_parts(snapshot)
    stages[0].eqns[:0] = reads

    slots: dict[Any, int] = collections.defaultdict(itertools.count().__next__)
    arguments = tuple(slots[v] for v in jaxpr.invars)
    pulls = tuple((slots[v], part.key) for v, part in pulled.items())
    cut = _cut_stages(name, stages, results, constants, localities, cutter)
    programs = _Programs(name, jaxpr, constants, localities)
    made = tuple(programs.stage(number, stage, slots) for number, stage in enumerate(cut))
    require_small(name, made)
    rebuild = traced.result.combine
    if topology.num_replicas > 1:
        is_varying = [v in localities.varying for v in results]
        rebuild = functools.partial(_rebuild, rebuild, is_varying, topology)
    return StepPlan(
        name=name,
        arguments=arguments,
        pulls=pulls,
        stages=made,
        results=tuple(slots[v] for v in results),
        rebuild=rebuild,
        owners={part.key: part.server or 0 for v in variables for part in parts_of(v)},
        kept=tuple(v.stored for v in variables),
        varying=frozenset(slots[v] for v in localities.varying if v in slots),
    )


def _rebuild(
    combine: Callable[[Sequence[Any]], Any],
    is_varying: Sequence[bool],
    topology: Topology,
    arrays: Sequence[jax.Array],
) -> Any:
    """Returns the user's results, as values of the strategy on its device."""
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


def _uses(stage: TracedStage) -> set[Any]:
    """Returns the names that a stage computes with, or sends."""
    eqns = (v for e in stage.eqns for v in e.invars)
    return {*values_of(eqns), *values_of(a for m in stage.merges for a in m.arguments)}


def _cut_stages(
    name: str,
    stages: Sequence[TracedStage],
    results: Sequence[Any],
    constants: dict[Any, Any],
    localities: Localities,
    cutter: Cutter,
) -> list[CutStage]:
    """Returns the stages with their merges cut by server."""
    cut: list[CutStage] = []
    later, num_servers = set(results), cutter.num_servers
    for number, stage in reversed([*enumerate(stages)]):
        joined, moved, pushes = NOTHING_RUN, NOTHING_RUN, []
        if stage.merges:
            update = trace_update(stage.merges, constants, later, localities)
            update, joined = join_answers(update)
            early = slices_of_operands(update)
            if cutter.way == "least_bytes":
                early = equations_at_worker(update, num_servers)
            moved, update = move_to_worker(update, early)
            pushes = cut_by_owner(update, name, number, num_servers)
        if joined.results:
            after = cut.pop() if cut else CutStage(TracedStage(), joined, NOTHING_RUN, [], later)
            cut.append(dataclasses.replace(after, joined=joined))
        cut.append(CutStage(stage, NOTHING_RUN, moved, pushes, later.union(joined.operands)))
        later = later | _uses(stage)
    return cut[::-1]


class _Programs:
    """Makes the programs of one plan: names of the trace become slots of the worker."""

    def __init__(self, name: str, jaxpr: Jaxpr, constants: dict[Any, Any], localities: Localities):
        self._name, self._jaxpr, self._constants = name, jaxpr, constants
        self._localities, topology = localities, localities.topology
        if topology.num_replicas > 1:  # for the devices of any worker
            topology = abstract_topology(topology.num_replicas, topology.axis_name)
        self._emitter = JaxprEmitter(topology)

    def stage(self, number: int, cut: CutStage, slots: dict[Any, int]) -> Stage:
        """Returns one stage of the plan; new names get slots."""
        needed = cut.later.union(*(push.operands for push in cut.pushes))
        made = [*cut.joined.results, *(v for e in cut.traced.eqns for v in e.outvars)]
        made += cut.moved.results
        if number == 0:
            made += [name for name in self._constants if isinstance(name, ConstantResult)]
        wanted = [v for v in made if v in needed]
        code, operands = self._worker_code(cut, wanted)
        return Stage(
            operands=tuple(slots[v] for v in operands),
            results=tuple(slots[v] for v in wanted),
            program=code.as_program(f"{self._name} worker {number}"),
            pushes=tuple(
                dataclasses.replace(
                    push,
                    operands=tuple(slots[v] for v in push.operands),
                    answers=tuple(slots[v] for v in push.answers),
                )
                for push in cut.pushes
            ),
        )

    def _worker_code(self, cut: CutStage, wanted: Sequence[Any]) -> tuple[Code, list[Any]]:
        """Returns the code that a worker runs in one stage, and the names of its operands."""
        eqns, joined, moved = cut.traced.eqns, cut.joined, cut.moved
        made = {v for e in eqns for v in e.outvars}
        used = dict.fromkeys(values_of(v for e in eqns for v in e.invars))
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
