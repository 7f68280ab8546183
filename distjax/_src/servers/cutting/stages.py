"""A replica trace as stages: what a worker computes, then the merges that run at the servers.

A merge that reads or writes a variable runs where the variable lives. The equations that compute
its arguments are in its stage or in an earlier one; whatever needs one of its results is in a later
one. Merges of one stage do not need each other's results, so they become one function, the update
of the stage. It is cut into a part for the worker, and a share for each server.

An equation of a merge that depends on no variable can run on either side. Which ones run at the
worker is a minimum cut of the graph of the update: its edges are values, weighted by their bytes,
once for each server that needs them. Among cuts of equal weight, the latest one leaves the least to
the servers: there are many workers, and all of them wait for a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from distjax._src import jax_compat, traces, user_lines
from distjax._src.jax_compat import Jaxpr, JaxprEqn, Literal, ShapedArray, Var
from distjax._src.jaxprs import CALLS
from distjax._src.placement import Topology
from distjax._src.replica.analysis import MERGE_NAME
from distjax._src.replica.emit import JaxprEmitter
from distjax._src.replica.global_value import GlobalValue, as_user_value
from distjax._src.replica.merge import (
    BatchedMerge,
    CotangentMerge,
    Merge,
    TangentMerge,
    UserMerge,
    WeakMerge,
)
from distjax._src.servers.cutting.code import (
    NOTHING_RUN,
    NamedCode,
    aval_of_atom,
    eval_opened,
    in_own_buffers,
    trace_code,
    values_of,
)
from distjax._src.servers.cutting.rows import in_shards
from distjax._src.servers.plan import Push
from distjax._src.servers.storage import Part, num_bytes, parts_of, sizes_of
from distjax._src.variables.state import find_variables, variable_p
from distjax._src.variables.variable import Variable
from distjax.errors import MergeError, message, require

# -- which values differ per replica of a worker, and how programs hold them --


@dataclass(frozen=True)
class Localities:
    """How the values of a trace are held: as one array, with a row per replica if they may differ.

    Attributes:
      topology: the replicas of a worker.
      varying: the names of the values that may differ; with one replica, none.
    """

    topology: Topology
    varying: frozenset[Any]

    def aval(self, name: Var) -> ShapedArray:
        """Returns shape and dtype of the array that holds a value."""
        aval = aval_of_atom(name)
        if name not in self.varying:
            return aval
        shape = (self.topology.num_replicas, *aval.shape)
        return ShapedArray(shape, aval.dtype, weak_type=aval.weak_type)

    def value(self, name: Hashable, array: jax.Array) -> GlobalValue:
        """Returns the array that holds a value as a `GlobalValue`, varying or not."""
        return GlobalValue(array, not isinstance(name, Literal) and name in self.varying)

    def array(self, value: GlobalValue) -> Any:
        """Returns the array that holds a value."""
        is_one = self.topology.num_replicas == 1
        return as_user_value(value, self.topology) if is_one else jnp.asarray(value.array)


def find_localities(
    jaxpr: Jaxpr, consts: Sequence[Any], args_varying: Sequence[bool], topology: Topology
) -> Localities:
    """Returns the localities of all values of a replica trace.

    Emits the trace abstractly, as other strategies do, and keeps which values the emitter proved
    equal.
    """
    if topology.num_replicas == 1:
        return Localities(topology, frozenset())
    given = Localities(
        topology, frozenset(v for v, t in zip(jaxpr.invars, args_varying, strict=True) if t)
    )
    ins = [*jaxpr.invars, *find_variables(jaxpr)]
    atoms = (*(v for eqn in jaxpr.eqns for v in eqn.invars), *jaxpr.outvars)
    names = list(dict.fromkeys(values_of(atoms)))
    everything = jax_compat.new_jaxpr(jaxpr, (), jaxpr.invars, names, jaxpr.eqns)
    found: list[GlobalValue] = []

    def run(*arrays: jax.Array) -> list[Any]:
        values = [given.value(v, x) for v, x in zip(ins, arrays, strict=True)]
        known = dict(zip(ins, values, strict=True))
        known.update((v, given.value(v, c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
        args = values[: len(jaxpr.invars)]
        found[:] = JaxprEmitter(topology).emit(everything, (), args, known)
        return [value.array for value in found]

    traces.trace_jaxpr(run, list(map(given.aval, ins)), only_shapes=True)
    return Localities(
        topology, frozenset(v for v, x in zip(names, found, strict=True) if x.varying)
    )


# -- merges at servers --------------------------------------------------------


#: What users may have written for a primitive.
_CONSTRUCTS = {
    "cond": "a branch (cond or switch)",
    "remat": "checkpoint",
    "remat2": "checkpoint",
    "scan": "a loop (scan or fori_loop)",
    "while": "a loop (while_loop or fori_loop)",
}


@dataclass(frozen=True)
class ServerMerge:
    """A merge that reads or writes variables: one equation of a replica trace.

    Attributes:
      eqn: the equation.
      read: for each operand, the variable whose value it is; None for an argument, which is sent.
      written: the variables whose new values are its last results.
    """

    eqn: JaxprEqn
    read: tuple[Variable | None, ...]
    written: tuple[Variable, ...]

    @property
    def arguments(self) -> list[Any]:
        """The operands that are sent to the servers."""
        pairs = zip(self.eqn.invars, self.read, strict=True)
        return [atom for atom, variable in pairs if variable is None]


@dataclass(frozen=True)
class TracedStage:
    """The equations of a worker, and the merges that follow them."""

    eqns: list[JaxprEqn] = field(default_factory=list)
    merges: list[ServerMerge] = field(default_factory=list)


def as_server_merge(eqn: JaxprEqn) -> ServerMerge | None:
    """Returns an equation as a merge at servers; None if it is not one."""
    if eqn.primitive.name != MERGE_NAME:
        return None
    merge = _merge_of_user(eqn.params["merge"])
    if not merge.read and not merge.written:
        return None
    is_own = isinstance(eqn.params["merge"], WeakMerge)  # a derivative of one writes nothing
    num_arguments = len(merge.args.leaves)
    read = [None] * num_arguments + merge.read
    read += [None] * (len(eqn.invars) - len(read))
    return ServerMerge(eqn, tuple(read), tuple(merge.written) if is_own else ())


def _merge_of_user(merge: Merge) -> UserMerge:
    """Returns the user's merge, of which `merge` may be a derivative or a mapped form."""
    if isinstance(merge, WeakMerge):
        found = merge.user_merge
        assert found is not None, "the trace keeps its merges alive"
        return found
    assert isinstance(merge, (TangentMerge, CotangentMerge, BatchedMerge)), "no other merges"
    return _merge_of_user(merge.tangent if isinstance(merge, CotangentMerge) else merge.base)


# -- merges in calls ----------------------------------------------------------


def open_calls(jaxpr: Jaxpr, consts: Sequence[Any], topology: Topology) -> tuple[Jaxpr, list[Any]]:
    """Returns the trace with calls inlined that hold merges at servers: these are then on top."""
    if all(as_server_merge(e) or not _holds_server_merge(e) for e in jaxpr.eqns):
        return jaxpr, list(consts)
    avals = [v.aval for v in jaxpr.invars]
    axis_env = [(topology.axis_name, topology.num_replicas)]
    opens = lambda eqn: as_server_merge(eqn) is None and _holds_server_merge(eqn)
    opened = lambda *args: eval_opened(jaxpr, consts, args, opens)
    return traces.trace_jaxpr(opened, avals, axis_env)


def _holds_server_merge(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is, or holds, a merge at servers; that has to be a call."""
    if as_server_merge(eqn) is not None:
        return True
    inner = (e for sub in jax_compat.sub_jaxprs(eqn) for e in sub.eqns)
    found = next(filter(_holds_server_merge, inner), None)
    name = eqn.primitive.name
    if found is not None and (name not in CALLS or name.startswith(("remat", "checkpoint"))):
        raise MergeError(_loop_text(name, found))
    return found is not None


def _loop_text(name: str, merge: JaxprEqn) -> str:
    name = _CONSTRUCTS.get(name, name)
    return message(
        f"a merge_call that meets a parameter server needs to be outside of {name}",
        got=f"one inside of it, at {user_lines.source_line(merge)}",
        why="every pass of it would be a round trip to the server (a write of a variable in a "
        "replica function is such a merge)",
        fix="collect inside what the variables need, and merge once after it; or put all of it "
        "into the merge function, which runs at the server",
    )


# -- stages -------------------------------------------------------------------


def read_parts(snapshot: Mapping[Var, Variable]) -> tuple[list[JaxprEqn], dict[Var, Part]]:
    """Returns equations that join variables from their parts, and the parts by name."""
    eqns: list[JaxprEqn] = []
    pulled: dict[Var, Part] = {}
    for name, variable in snapshot.items():
        parts, names = parts_of(variable), [name]
        if len(parts) > 1:
            avals = [jax_compat.ShapedArray(part.shape, part.dtype) for part in parts]
            joined = trace_code(lambda *rows: [jax.lax.concatenate(rows, 0)], avals)
            eqns += [eqn.replace(outvars=[name]) for eqn in joined.jaxpr.eqns]
            names = joined.inputs
        pulled.update(zip(names, parts, strict=True))
    return eqns, pulled


def split_stages(jaxpr: Jaxpr, results: Sequence[Any]) -> list[TracedStage]:
    """Returns the equations that `results`, effects and writes need, each in its stage."""
    stages = [TracedStage()]
    level: dict[Any, int] = {}
    latest = 0  # merges keep the order of the program
    for eqn, merge in _needed(jaxpr, results):
        atoms = eqn.invars if merge is None else merge.arguments
        stage = max((level.get(v, 0) for v in values_of(atoms)), default=0)
        if merge is None:
            stages[stage].eqns.append(eqn)
        else:
            stage = latest = max(stage, latest)
            stages[stage].merges.append(merge)
        produced = stage if merge is None else stage + 1
        level.update((v, produced) for v in eqn.outvars)
        if produced == len(stages):
            stages.append(TracedStage())
    return stages if stages[-1].eqns or len(stages) == 1 else stages[:-1]


def _needed(jaxpr: Jaxpr, results: Sequence[Any]) -> Iterator[tuple[JaxprEqn, ServerMerge | None]]:
    """Yields the equations that results, effects and writes depend on."""
    needed = set(values_of(results))
    kept: list[tuple[JaxprEqn, ServerMerge | None]] = []
    for eqn in reversed(jaxpr.eqns):
        merge = as_server_merge(eqn)
        has_effect = bool(eqn.effects) or (merge is not None and bool(merge.written))
        if eqn.primitive is variable_p or not (has_effect or needed.intersection(eqn.outvars)):
            continue
        kept.append((eqn, merge))
        atoms = eqn.invars if merge is None else merge.arguments
        needed.update(values_of(atoms))
    yield from reversed(kept)


# -- the update of a stage ----------------------------------------------------


def trace_update(
    merges: Sequence[ServerMerge],
    constants: dict[Var, Any],
    needed: set[Var],
    localities: Localities,
) -> NamedCode:
    """Returns the merges of one stage as one function: their update.

    It takes the current values of variables, and what the worker sends; and computes their new
    values, and the answers: the results of merges that are `needed` afterwards. Each merge sees
    what the one before has written. The constants of the trace are not sent.
    """
    read = (v for m in merges for v in (*m.read, *m.written) if v is not None)
    variables = tuple(dict.fromkeys(read))
    atoms = values_of(a for m in merges for a in m.arguments)
    operands = tuple(dict.fromkeys(a for a in atoms if a not in constants))
    written = tuple(dict.fromkeys(v for m in merges for v in m.written))
    answers = tuple(v for m in merges for v in m.eqn.outvars if v in needed)

    def update(*arrays: jax.Array) -> list[Any]:
        now = dict(zip(variables, arrays, strict=False))
        env = {**constants, **dict(zip(operands, arrays[len(variables) :], strict=True))}
        for merge in merges:
            _run_merge(merge, now, env, localities)
        return [*(now[v] for v in written), *(env[v] for v in answers)]

    avals = [ShapedArray(v.shape, v.dtype) for v in variables]
    avals += map(localities.aval, operands)
    code, parts = trace_code(update, avals, is_opened=True), _parts_of_all(variables)
    if len(parts) > len(variables):
        taken = [*map(sizes_of, variables), *(() for _ in operands)]
        given = [*map(sizes_of, written), *(() for _ in answers)]
        code = in_shards(code, taken, given)
    return NamedCode(code, (*parts, *operands), (*_parts_of_all(written), *answers))


def _parts_of_all(variables: Sequence[Variable]) -> tuple[Part, ...]:
    return tuple(part for v in variables for part in parts_of(v))


def _run_merge(
    merge: ServerMerge, now: dict[Variable, Any], env: dict[Any, Any], localities: Localities
) -> None:
    """Runs a merge on the current values of its variables."""
    values = []
    for atom, variable in zip(merge.eqn.invars, merge.read, strict=True):
        if variable is not None:
            values.append(GlobalValue(now[variable], False))
        else:
            value = atom.val if isinstance(atom, Literal) else env[atom]
            values.append(localities.value(atom, value))
    outs = merge.eqn.params["merge"].emit(values, localities.topology)
    results = list(map(localities.array, outs))
    env.update(zip(merge.eqn.outvars, results, strict=True))
    num_results = len(results) - len(merge.written)
    now.update(zip(merge.written, results[num_results:], strict=True))


# -- answers that need several servers: the worker joins their shares ---------


def join_answers(update: NamedCode) -> tuple[NamedCode, NamedCode]:
    """Returns an update whose answers need one server each, and code that joins the others.

    At which servers a value can be computed follows from the parts that it depends on.
    """
    code, pairs = update.code, update.pairs()
    homes: dict[Var, frozenset[int | None]] = {
        v: frozenset((part.server,)) for v, part in zip(code.inputs, update.parts, strict=False)
    }
    nowhere = frozenset[int | None]()
    homes_of = lambda atom: nowhere if isinstance(atom, Literal) else homes.get(atom, nowhere)
    are_several = lambda atom: len(homes_of(atom) - {None}) > 1
    for eqn in code.jaxpr.eqns:
        homes.update(dict.fromkeys(eqn.outvars, nowhere.union(*map(homes_of, eqn.invars))))
    joint = [(name, v) for name, v in pairs if not isinstance(name, Part) and are_several(v)]
    if not joint:
        return update, NOTHING_RUN
    # The worker runs what no single server can, or none has to.
    may_leave = lambda out: are_several(out) or not homes_of(out)
    eqns = [e for e in code.jaxpr.eqns if not e.effects and may_leave(e.outvars[0])]
    joined = update.part(joint, eqns)
    current = dict(zip(update.operands, code.inputs, strict=True))
    operands = [current[x] if isinstance(x, Part) else x for x in joined.operands]
    asked = [(v, v) for v in operands if v not in current]
    rest = update.part([pair for pair in pairs if pair not in joint] + asked)
    return rest, dataclasses.replace(joined, operands=tuple(operands))


# -- shares by owner ----------------------------------------------------------


def results_by_server(update: NamedCode, num_servers: int) -> dict[int, list[int]]:
    """Returns the numbers of the results that each server computes.

    A part is written where it lives; an answer is computed where the variables that it reads live.
    """
    numbers: dict[int, list[int]] = {k: [] for k in range(num_servers)}
    for number, name in enumerate(update.results):
        if not isinstance(name, Part):
            parts = _parts_used(update, [number]) or update.parts
            numbers[_first_server(parts)].append(number)
            continue
        for server in numbers if name.server is None else (name.server,):
            numbers[server].append(number)
    return {k: v for k, v in numbers.items() if v}


def _first_server(parts: Iterable[Part]) -> int:
    return min((part.server for part in parts if part.server is not None), default=0)


def _parts_used(update: NamedCode, results: Sequence[int]) -> list[Part]:
    return update.part([update.pairs()[i] for i in results]).parts


def cut_by_owner(update: NamedCode, name: str, stage: int, num_servers: int) -> list[Push]:
    """Returns what each server that takes part in an update is sent, does and answers.

    Operands and answers have their names in the trace; they become slots later. Raises a
    MergeError if a server would need another one's variable, or several the value of a callback.
    """
    results = results_by_server(update, num_servers)
    if any(eqn.effects for eqn in update.code.jaxpr.eqns):
        results = results or {_first_server(update.parts): []}
        require(
            len(results) == 1,
            f"{name} needs merges with callbacks to run at one server",
            got=f"one that servers {' and '.join(map(str, sorted(results)))} take part in",
            why="each of them would call it, and servers do not talk to each other",
            fix="call it in the step, and pass what it returns: "
            f"ctx.merge_call(fn, args=(value,)); or {_ONE_SERVER}",
            error=MergeError,
        )
    pushes: list[Push] = []
    for server, own in sorted(results.items()):
        share = update.part([update.pairs()[i] for i in own])
        if _foreign(share.parts, server):
            raise MergeError(_foreign_text(update, name, server, own))
        pushes.append(
            Push(
                server=server,
                operands=share.operands[len(share.parts) :],
                takes=tuple(part.key for part in share.parts),
                writes=tuple(part.key for part in share.written),
                answers=share.results[len(share.written) :],
                program=in_own_buffers(share.code).as_program(f"{name} server {server}.{stage}"),
            )
        )
    return pushes


def _foreign(parts: Sequence[Part], server: int) -> list[Part]:
    """Returns the parts that `server` does not have."""
    return [part for part in parts if part.server not in (None, server)]


def _foreign_text(update: NamedCode, name: str, server: int, results: Sequence[int]) -> str:
    written = [i for i in results if i < len(update.written)]
    wrong = [i for i in written if _foreign(_parts_used(update, [i]), server)]
    what = f"variable {update.written[wrong[0]].name!r}" if wrong else "a callback of its merge"
    used = _parts_used(update, wrong[:1] or results)
    foreign = _foreign(used, server)
    lives = ", ".join(f"{part.name!r} {part.lives}" for part in foreign[:3])
    lives += f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
    other, whole = foreign[0].variable, ""
    if any(part.is_shard for part in foreign):
        whole = "; or leave variables whole: partitioner=lambda shape, dtype: [1] * len(shape)"
    fix = f"{_ONE_SERVER}, where all variables live together{whole}"
    if other.isidentifier():  # not a slot or an accumulator, such as w/accumulator
        fix = (
            f"pass the worker's value of it: ctx.merge_call(fn, args=({other}.value,)); or make "
            f"them live together: with strategy.extended.colocate_vars_with({other}): ...; or "
            f"{_ONE_SERVER}{whole}"
        )
    return message(
        f"{name} needs merges whose variables live at one server",
        got=f"{what}, computed at server {server}, from variables {lives}",
        why="servers do not talk to each other: each updates what it has, from what a worker "
        "sends; a shard of a partitioned variable from its own rows",
        fix=fix,
    )


_ONE_SERVER = "dj.ParameterServerStrategy(servers=1)"


# -- which part runs at the worker: the fewest bytes --------------------------


#: The ends of the graph, and the capacity of an edge that no cut may cross.
WORKER, SERVERS = "worker", "servers"
ENDLESS = 1 << 30


def move_to_worker(update: NamedCode, early: Collection[int]) -> tuple[NamedCode, NamedCode]:
    """Returns the part of an update that the worker runs before it sends anything, and the rest."""
    eqns = list(enumerate(update.code.jaxpr.eqns))
    made = {v for i in early for v in update.code.jaxpr.eqns[i].outvars}
    here = made.union(update.code.inputs[len(update.parts) :])
    own = [(x, v) for x, v in update.pairs() if not (isinstance(x, Part) or isinstance(v, Literal))]
    own = [(name, v) for name, v in own if v in here]
    asked = [pair for pair in update.pairs() if pair not in own]
    rest = update.part(asked, [e for i, e in eqns if i not in early])
    computed = [(v, v) for v in rest.operands if v in made]
    first = [e for i, e in eqns if i in early or not e.effects]  # effects of the rest stay there
    return update.part(computed + own, first), rest


def equations_at_worker(update: NamedCode, num_servers: int) -> set[int]:
    """Returns the numbers of the equations of an update that its worker runs.

    A cut of the graph of the update pays for each edge from the worker's side to the servers'. Its
    nodes are the two ends, the equations by number, and (server, value) for a value that is sent
    there. What depends on constants alone has no node: both sides compute it.
    """
    code, edges = update.code, dict[tuple[Any, Any], int]()
    pairs = zip(code.inputs, update.operands, strict=True)
    maker: dict[Any, Any] = {v: SERVERS if isinstance(x, Part) else WORKER for v, x in pairs}
    known = lambda atoms: [v for v in values_of(atoms) if v in maker]
    for number, eqn in enumerate(code.jaxpr.eqns):
        makers = [maker[v] for v in known(eqn.invars)]
        if eqn.effects or makers:
            maker.update(dict.fromkeys(eqn.outvars, number))
        # The worker may run it only if it runs those that compute its operands.
        for needed in (*makers, SERVERS) if eqn.effects else makers:
            if needed is not WORKER:
                edges[number, needed] = ENDLESS
    for server, numbers in results_by_server(update, num_servers).items():
        own = code.cut_to(numbers)
        needs = [(e.invars, maker[made[0]]) for e in own.jaxpr.eqns if (made := known(e.outvars))]
        num_written = sum(number < len(update.written) for number in numbers)
        needs.append((list(own.outputs[:num_written]), SERVERS))
        for value, consumer in ((v, user) for atoms, user in needs for v in known(atoms)):
            if maker[value] is not SERVERS:
                edges[maker[value], (server, value)] = _num_bytes(value)
                edges[(server, value), consumer] = ENDLESS
    for value in known(code.outputs[len(update.written) :]):  # an answer of a server's travels
        if isinstance(maker[value], int):
            edges[WORKER, maker[value]] = _num_bytes(value)
    return _worker_side(edges)


def _worker_side(edges: Mapping[tuple[Any, Any], int]) -> set[int]:
    """Returns the equations on the worker's side of the latest minimum cut."""
    nodes = {WORKER: 0, SERVERS: 1}
    for edge in edges:
        for node in edge:
            nodes.setdefault(node, len(nodes))
    sizes = [size for size in edges.values() if size != ENDLESS]
    unit = 1 + sum(sizes) // (ENDLESS // 2)  # so that no sum of capacities is too large
    capacities = [x if x == ENDLESS else -(-x // unit) for x in edges.values()]
    ends = np.array([[nodes[a], nodes[b]] for a, b in edges]).reshape(-1, 2).T
    values = (np.array(capacities, np.int32), (ends[0], ends[1]))
    capacity = coo_matrix(values, (len(nodes), len(nodes))).tocsr()
    left = (capacity - maximum_flow(capacity, 0, 1).flow).maximum(0)
    left.eliminate_zeros()
    at_servers = set(breadth_first_order(left.T, 1, return_predecessors=False).tolist())
    return {n for n, i in nodes.items() if isinstance(n, int) and i not in at_servers}


def slices_of_operands(update: NamedCode) -> set[int]:
    """Returns the numbers of the equations that slice what a worker sends."""
    operands = update.code.inputs[len(update.parts) :]
    eqns = enumerate(update.code.jaxpr.eqns)
    return {i for i, e in eqns if e.primitive.name == "slice" and e.invars[0] in operands}


def _num_bytes(value: Var) -> int:
    return max(1, num_bytes(aval_of_atom(value)))
