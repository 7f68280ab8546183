"""A replica trace as stages: what a worker computes, then the merges that run at the servers.

A merge that reads or writes a variable runs where the variable lives. The equations that compute
its arguments are in its stage or in an earlier one; whatever needs one of its results is in a later
one. Merges of one stage do not need each other's results, so they become one push.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from distjax import inner_traces, jax_compat, user_lines
from distjax.context import frames
from distjax.errors import MergeError, message
from distjax.jax_compat import Jaxpr, JaxprEqn, Literal, ShapedArray, Var
from distjax.jaxprs import CALLS
from distjax.placement.topology import Topology
from distjax.replica.analysis import MERGE_NAME
from distjax.replica.emit import JaxprEmitter
from distjax.replica.global_value import GlobalValue, as_user_value
from distjax.replica.merge import (
    BatchedMerge,
    CotangentMerge,
    Merge,
    TangentMerge,
    UserMerge,
    WeakMerge,
)
from distjax.servers.cutting.code import aval_of_atom, eval_opened, trace_code
from distjax.servers.storage import Part, parts_of
from distjax.variables.state import find_variables, variable_p
from distjax.variables.variable import Variable

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
    names = list(dict.fromkeys(v for v in atoms if not isinstance(v, Literal)))
    everything = jax_compat.new_jaxpr(jaxpr, (), jaxpr.invars, names, jaxpr.eqns)
    found: list[GlobalValue] = []

    def run(*arrays: jax.Array) -> list[Any]:
        values = [given.value(v, x) for v, x in zip(ins, arrays, strict=True)]
        known = dict(zip(ins, values, strict=True))
        known.update((v, given.value(v, c)) for v, c in zip(jaxpr.constvars, consts, strict=True))
        args = values[: len(jaxpr.invars)]
        found[:] = JaxprEmitter(topology).emit(everything, (), args, known)
        return [value.array for value in found]

    with frames.without_observer():
        inner_traces.trace_jaxpr(run, list(map(given.aval, ins)))
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
    """Returns the trace with calls inlined, so that each merge at servers is a top-level equation.

    Raises:
      MergeError: one is inside of a loop or branch.
    """
    if all(as_server_merge(e) or not _holds_server_merge(e) for e in jaxpr.eqns):
        return jaxpr, list(consts)
    avals = [v.aval for v in jaxpr.invars]
    axis_env = [(topology.axis_name, topology.num_replicas)]
    opens = lambda eqn: as_server_merge(eqn) is None and _holds_server_merge(eqn)
    opened = lambda *args: eval_opened(jaxpr, consts, args, opens)
    return inner_traces.trace_jaxpr(opened, avals, axis_env)


def _holds_server_merge(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is, or holds, a merge at servers.

    Raises:
      MergeError: it holds one, and is not a call.
    """
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
        f"a merge_call that meets a parameter server needs to stand outside of {name}",
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
        stage = max((level.get(v, 0) for v in atoms if not isinstance(v, Literal)), default=0)
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
    needed = {v for v in results if not isinstance(v, Literal)}
    kept: list[tuple[JaxprEqn, ServerMerge | None]] = []
    for eqn in reversed(jaxpr.eqns):
        merge = as_server_merge(eqn)
        has_effect = bool(eqn.effects) or (merge is not None and bool(merge.written))
        if eqn.primitive is variable_p or not (has_effect or needed.intersection(eqn.outvars)):
            continue
        kept.append((eqn, merge))
        atoms = eqn.invars if merge is None else merge.arguments
        needed.update(v for v in atoms if not isinstance(v, Literal))
    yield from reversed(kept)
