"""Runs a replica function in a trace: traces it as one replica sees it, and emits it.

The function is traced once. The emitter turns the jaxpr into global-view code in the outer trace
and proves which values are equal. Errors that JAX reports badly or late get a clear message here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from distjax._src import hooks, jax_compat, traces, user_lines, user_mesh
from distjax._src.collectives.mapping import constrain_to_replicas
from distjax._src.context import Frame, StrategyLike, frames, without_expectations
from distjax._src.jax_compat import Jaxpr, JaxprEqn
from distjax._src.placement import PerReplica, Topology, require_not_split, require_same_topology
from distjax._src.replica.analysis import Analysis, holds_merge
from distjax._src.replica.arguments import (
    PartitionedTree,
    function_name,
    is_array,
    is_object_state,
    mark_modules,
    partition_result,
    positional_names,
    require_finished,
    user_path,
)
from distjax._src.replica.contexts import ReplicaContext
from distjax._src.replica.emit import JaxprEmitter
from distjax._src.replica.global_value import (
    GlobalValue,
    as_user_value,
    from_user_value,
    from_variable,
    replica_aval,
    to_variable,
)
from distjax._src.replica.merge import UserMerge
from distjax._src.traces import type_of
from distjax._src.typing import PyTree
from distjax._src.variables.conversion import is_number
from distjax._src.variables.state import CreationLog, TraceState, find_variables
from distjax.errors import LocalityError, MergeError, message


@dataclasses.dataclass
class ReplicaTrace:
    """A traced replica function.

    Attributes:
      jaxpr, consts: the replica view; its outputs are the array results, then the written
        variables, then the initial values of the created ones.
      merges: the merges that the jaxpr's equations reference weakly.
    """

    jaxpr: jax_compat.Jaxpr
    consts: list[Any]
    result: PartitionedTree
    written: list[Any]
    created: list[Any]
    merges: list[UserMerge]


def trace_replica(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    given: Given,
    outer: TraceState,
    topology: Topology,
) -> ReplicaTrace:
    """Traces ``fn`` once, as one replica sees it."""
    partitioned = given.partitioned
    found: dict[str, Any] = {}

    def traced(*local: jax.Array) -> list[Any]:
        creation = CreationLog.within(outer)
        state = TraceState(local_view=True, creations=creation)
        args, kwargs = partitioned.combine(local)
        context = ReplicaContext(strategy)
        with frames.with_frame(Frame(strategy, context, state)):
            returned = require_finished(fn(*args, **kwargs), fn)
            result = partition_result(returned, function_name(fn))
        if context.merge_error is not None:
            raise context.merge_error
        leaves = [_refuse_per_replica(leaf, fn) for leaf in result.take_leaves()]
        written = list(state.written)
        created = list(creation.values) if creation is not None else []
        found.update(result=result, written=written, created=created)
        found["merges"], context.merges = context.merges, []
        inits = creation.take_values() if creation is not None else []
        return [*leaves, *(state.read(v) for v in written), *inits]

    _name_after(traced, fn)
    avals = [replica_aval(x) for x in given.values]
    axis_env = [(topology.axis_name, topology.num_replicas)]
    try:
        try:
            with _model_axes_in_scope(topology):
                jaxpr, consts = traces.trace_jaxpr(traced, avals, axis_env)
        except AssertionError as error:
            if not str(error).startswith("ManualAxisType"):
                raise
            with _replica_axis_in_scope(topology):  # in which lax.pcast is the identity
                jaxpr, consts = traces.trace_jaxpr(traced, avals, axis_env)
    except Exception as error:
        add_notes(error, given.name, given.paths, partitioned.leaves, topology.num_replicas)
        raise
    return ReplicaTrace(jaxpr, consts, **found)


def _name_after(traced: Any, fn: Callable[..., Any]) -> None:
    """Makes JAX's errors name the user's function, and its leaves by number."""
    traced.__wrapped__ = fn
    traced.__signature__ = inspect.signature(lambda *leaves: None)


def _model_axes_in_scope(topology: Topology) -> Any:
    """Returns a context in which sharding constraints may name the model axes."""
    mesh = topology.users_mesh
    if mesh is None or len(mesh.axis_names) == 1:
        return contextlib.nullcontext()
    return user_mesh.manual_axis(mesh, topology.axis_name)


def _replica_axis_in_scope(topology: Topology) -> Any:
    """Returns a context in which `lax.pcast` may name the replica axis.

    Not used for every trace, as arrays closed over would then have to be on this mesh.
    """
    if topology.mesh is not None:
        return user_mesh.manual_axis(topology.mesh, topology.axis_name)
    manual = (jax.sharding.AxisType.Manual,)
    sizes, names = (topology.num_replicas,), (topology.axis_name,)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(sizes, names, manual))


def _refuse_per_replica(leaf: PyTree, fn: Callable[..., Any]) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    raise LocalityError(
        f"{function_name(fn)} needs to return values of one replica",
        got=f"a PerReplica of {leaf.num_replicas} values that it closes over",
        why="inside a replica function a value is that replica's own",
        fix="pass it as an argument: strategy.run(fn, args=(x,))",
    )


# -- causes and fixes of errors -------------------------------------------------


_TRACED_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
#: JAX's messages for a traced value as a shape, a length or an index.
_AS_NUMBER = re.compile("Shapes must be 1D|`length`|__index__")
#: Messages for a traced value whose number is needed, that of `f"{x:.3f}"` among them.
_AS_VALUE = re.compile("of concrete values.*Trace|unsupported format string passed to .*Tracer")
#: JAX's message for several PRNG keys in the place of one, with their shape.
_SEVERAL_KEYS = re.compile(r"accepts a single key, but was given a key array of shape (\(.*?\)) ")
#: Messages for a PerReplica in the place of an array: those of `PerReplica`, and of `jax.lax`.
_OF_PER_REPLICA = re.compile(
    r"one value per replica.*\s.*a PerReplica of|as a JAX value.*\.PerReplica'"
)
_CAPTURED = "The PerReplica is not an argument"
_START = "Python needs the value of a traced array"


def add_notes(
    error: Exception, name: str, paths: Sequence[str], leaves: Sequence[Any], num_replicas: int
) -> None:
    """Adds what is known of the cause to an error of a replica function's trace."""
    if isinstance(error, (AttributeError, TypeError, jax.errors.JAXTypeError)):
        add_captured_note(error, name)
        add_value_note(error, name, paths, leaves)
    elif isinstance(error, ValueError):
        add_keys_note(error, name, paths, leaves, num_replicas)


def add_value_note(
    error: Exception,
    name: str = "",
    paths: Sequence[str] = (),
    leaves: Sequence[Any] = (),
) -> None:
    """Adds a note to an error of JAX about a traced value; at most one, by the innermost trace."""
    text = str(error)
    if not isinstance(error, _TRACED_VALUE) and not _AS_VALUE.search(text):
        return
    if any(note.startswith(_START) for note in getattr(error, "__notes__", ())):
        return
    named = [int(i) for i in re.findall(r"(?:leaves|arrays)\[(\d+)\]", text) if int(i) < len(paths)]
    if named and all(_is_number(leaves[i]) for i in named):
        numbers = " and ".join(dict.fromkeys(paths[i] for i in named))
        first = paths[named[0]]
        fix = f"dj.static({first}) in place of {first}, where the step is called"
        why = f"argument {numbers} of {name} may change from call to call"
    elif isinstance(error, jax.errors.TracerBoolConversionError):
        why = "`if`, `while`, `and` decide once, and one trace serves all calls and replicas"
        fix = "jnp.where(condition, a, b), or jax.lax.cond (dj.lax.cond where it writes variables)"
    elif _AS_NUMBER.search(text):
        why = "shapes, lengths and indices of lists are part of the program"
        fix = "a number from x.shape; jax.lax.fori_loop for a loop, jnp.take for an index"
    else:
        why = "it is known only when the program runs, after float(x), x.item() or NumPy asked"
        fix = "return it, and read it outside of the step; jax.debug.print('{}', x) to print it"
    error.add_note(f"{_START}: {why}.\n  Fix: {fix}")


def add_captured_note(error: Exception, name: str) -> None:
    """Adds a note to the error of a PerReplica that replica function `name` captured."""
    if not _OF_PER_REPLICA.search(str(error)):
        return
    if not any(note.startswith(_CAPTURED) for note in getattr(error, "__notes__", ())):
        error.add_note(
            f"{_CAPTURED} of {name}: it has the values of all replicas there.\n"
            "  Fix: pass it as an argument: strategy.run(fn, args=(x,))"
        )


def add_keys_note(
    error: Exception, name: str, paths: Sequence[str], leaves: Sequence[Any], num_replicas: int
) -> None:
    """Adds a note to an error of JAX about several keys if an argument holds R of them.

    A loop of `jax.pmap` splits its key into as many.
    """
    found = _SEVERAL_KEYS.search(str(error))
    if found is None:
        return
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, PerReplica):
            continue
        shape = jax.typeof(leaf).shape
        if str(shape) == found[1] and shape[0] == num_replicas:
            error.add_note(
                f"Argument {path} of {name} holds {num_replicas} keys, as many as there are "
                "replicas, and each replica sees all of them.\n"
                f"  Fix: strategy.per_replica({path}) where the step is called; or one key there, "
                "and dj.get_replica_context().fold_in(key) in the step"
            )
            return


def _is_number(leaf: PyTree) -> bool:
    """Returns whether an argument came in as a Python number or bool, as far as its type shows."""
    if isinstance(leaf, PerReplica):
        return False
    aval: Any = type_of(leaf)
    return aval.shape == () and (aval.weak_type or aval.dtype == bool)


def require_no_other_mesh(name: str, jaxpr: Jaxpr, topology: Topology) -> None:
    """Raises if a replica function has a `shard_map` or `pmap` over devices of its strategy.

    Only one over model axes may stay: XLA rejects a second one over the replica axis, or aborts.
    """
    own = topology.mesh.axis_names if topology.mesh is not None else ()
    for outer, eqn in ((e, s) for e in jaxpr.eqns for s in _shard_maps(e)):
        axes = tuple(eqn.params["mesh"].axis_names)
        mapped = eqn.params["newly_manual_axes"]
        maps_replicas = topology.axis_name in mapped and topology.num_replicas > 1
        # The emitter reports merges.
        if (set(axes) <= set(own) and not maps_replicas) or holds_merge(eqn):
            continue
        raise MergeError(
            f"{name} needs to leave devices to its strategy",
            got=f"a jax.pmap or jax.shard_map over axes {axes}, at {user_lines.source_line(outer)}",
            why="a replica function already runs on every device, and has no further devices "
            "to map over",
            fix="jax.vmap in its place; model_axes={...} of dj.MirroredStrategy for axes "
            "inside a replica; or the call outside of run",
        )


def require_own_axis(name: str, jaxpr: Jaxpr, topology: Topology) -> None:
    """Raises if the collectives of `jaxpr` would bind to an enclosing `jax.vmap`.

    JAX gives them the vmap's axis if the mesh has an axis of the same name.
    """
    axis_name = topology.axis_name
    in_replica = any(frame.is_replica for frame in frames.stack())
    if topology.mesh is None or in_replica or not _is_bound(axis_name):
        return
    if next(Analysis(axis_name).collectives(jaxpr), None) is None:
        return
    raise ValueError(
        message(
            f"{name} needs an axis_name that no jax.vmap around it has",
            got=f"{axis_name!r}, for both",
            why="JAX would run its collectives over the vmap's axis, as it does under jax.pmap",
            fix=f"jax.vmap(fn, axis_name='rows'), or any name but {axis_name!r}",
        )
    )


def _is_bound(name: str) -> bool:
    """Returns whether an axis of this name is bound here."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        return False
    return True


def _shard_maps(eqn: JaxprEqn) -> list[JaxprEqn]:
    if eqn.primitive.name == "shard_map":
        return [eqn]
    return [e for sub in jax_compat.sub_jaxprs(eqn) for s in sub.eqns for e in _shard_maps(s)]


# -- run: traced and emitted ---------------------------------------------------


class Given(NamedTuple):
    """A replica function's arguments, the user's names for them, and the values of the leaves."""

    name: str
    partitioned: PartitionedTree
    names: Sequence[str]
    values: Sequence[GlobalValue]

    @property
    def paths(self) -> list[str]:
        """The user's paths to the leaves."""
        return [user_path(path, self.names) for path in self.partitioned.paths]


class TracedRun(NamedTuple):
    """A replica function that has been traced and emitted.

    Attributes:
      results: its array results, in the global view; `values`: the same as the user gets them.
      finals: the last values of the variables that it writes, in the global view.
      unequal: the variables that it creates with an initial value that differs.
      num_own: how many of the results are the user's; the others are state of objects.
      is_first_of_several: whether the user's results are the first of a tuple of trees.
      expectations: by `id`, each array that `dj.expect` allows to come back different, and why.
    """

    fn: Callable[..., Any]
    given: Given
    traced: ReplicaTrace
    topology: Topology
    results: Sequence[GlobalValue]
    finals: Sequence[GlobalValue]
    unequal: Sequence[Any]
    expectations: Mapping[int, tuple[Any, str]]
    values: Sequence[Any] = ()
    num_own: int = 0
    is_first_of_several: bool = False


def emit_on_replicas(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    given: Given,
    traced: ReplicaTrace,
    outer: TraceState,
) -> TracedRun:
    """Emits ``fn``, which has been traced, on every replica, with what it writes, into `outer`."""
    topology = strategy.extended.topology
    require_no_other_mesh(given.name, traced.jaxpr, topology)
    for captured in traced.consts:
        require_not_split(captured, topology, f"an array that {given.name} captures")
    require_own_axis(given.name, traced.jaxpr, topology)
    emitter = next(iter(hooks.tell(hooks.emitters, topology)), None) or JaxprEmitter(topology)
    known = _read_values(traced.jaxpr, outer)
    outs = emitter.emit(traced.jaxpr, traced.consts, given.values, known)
    num_results, num_written = len(traced.result.leaves), len(traced.written)
    results, finals = outs[:num_results], outs[num_results : num_results + num_written]
    unequal = _bind_created(traced.created, outs[num_results + num_written :], outer)
    for variable, value in zip(traced.written, finals, strict=True):
        outer.write(variable, to_variable(variable, value, topology))
    return TracedRun(fn, given, traced, topology, results, finals, unequal, outer.expectations)


def run_in_trace(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    outer: TraceState,
    *,
    returns_object_state: bool = False,
) -> Any:
    """Emits ``fn`` on every replica into the current trace; returns results in the global view.

    If it `returns_object_state`, the user's results are the first of a tuple of trees. The others
    are state of objects, which rules later turn into single values.
    """
    topology = strategy.extended.topology
    names = positional_names(fn)
    told = hooks.tell(hooks.on_call, outer.memory, fn, (function_name(fn), names), args, kwargs)
    args, kwargs = without_expectations(args, kwargs, outer.expectations)
    partitioned = PartitionedTree(
        mark_modules((args, kwargs), tuple(names)), lambda leaf: is_array(leaf) or is_number(leaf)
    )
    _require_same_replicas(fn, partitioned, names, topology)
    global_values = list(map(from_user_value, partitioned.leaves))
    given = Given(function_name(fn), partitioned, names, global_values)
    traced = trace_replica(strategy, fn, given, outer, topology)
    run = emit_on_replicas(strategy, fn, given, traced, outer)
    tree, is_several = run.traced.result, returns_object_state
    run = run._replace(
        values=[as_user_value(r, topology) for r in _pin_results(run.results, topology)],
        num_own=sum(path.startswith("[0]") or not is_several for path in tree.paths),
        is_first_of_several=is_several,
    )
    hooks.tell(hooks.on_traced, run)
    result = tree.combine(run.values)
    for after_call in told:
        after_call(result, {})
    return result


def _require_same_replicas(
    fn: Callable[..., Any], partitioned: PartitionedTree, names: Sequence[str], topology: Topology
) -> None:
    for leaf, path in zip(partitioned.leaves, partitioned.paths, strict=True):
        where = f"argument {user_path(path, names)} of {function_name(fn)}"
        if isinstance(leaf, PerReplica):
            require_same_topology(leaf, topology, where)
        elif not is_object_state(path):
            require_not_split(leaf, topology, where)


def _pin_results(results: Sequence[GlobalValue], topology: Topology) -> Sequence[GlobalValue]:
    """Constrains `results` to the strategy's devices if no map over them does.

    Otherwise, if all arguments are uncommitted, `jit` would pick the default device.
    """
    if topology.maps_devices:
        return results
    if topology.mesh is not None:
        place = functools.partial(constrain_to_replicas, topology=topology)
        return [GlobalValue(place(r.array, varying=r.varying), r.varying) for r in results]
    arrays = jax.lax.with_sharding_constraint([r.array for r in results], topology.mirrored)
    return [GlobalValue(a, r.varying) for a, r in zip(arrays, results, strict=True)]


def _bind_created(
    created: Sequence[Any], values: Sequence[GlobalValue], outer: TraceState
) -> list[Any]:
    """Gives created variables replica 0's values in the outer trace; returns those that differ."""
    for variable, value in zip(created, values, strict=True):
        first = value.array[0] if value.varying else value.array
        outer.creations.collect(variable, first)  # pyright: ignore[reportOptionalMemberAccess]
        outer.bind(variable, jnp.broadcast_to(first, variable.global_shape))
    return [v for v, value in zip(created, values, strict=True) if value.varying]


def _read_values(jaxpr: Jaxpr, outer: TraceState) -> dict[Any, GlobalValue]:
    """Returns the values of the variables that a replica function reads."""
    read = find_variables(jaxpr)
    return {name: from_variable(variable, outer.read(variable)) for name, variable in read.items()}
