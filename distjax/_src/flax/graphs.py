"""NNX objects as graphs: which values are objects, whose they are, and who may change them."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import jax
from flax import nnx
from flax.nnx import pytreelib, tracers

from distjax._src import jax_compat
from distjax._src.context import StrategyLike
from distjax._src.jax_compat import Tracer
from distjax._src.objects.walk import MAX_DEPTH
from distjax._src.placement import is_host_memory
from distjax._src.replica import merge
from distjax._src.strategies.strategy import are_equal
from distjax._src.typing import PyTree
from distjax._src.user_lines import UNKNOWN, SourceFrame, find_line
from distjax.errors import StrategyMismatchError, TraceLeakError, describe_value, message

# -- object types -------------------------------------------------------------
# Which values are NNX objects, asked of their types: `isinstance` runs Python code of Flax.


_OBJECTS = (nnx.Pytree, nnx.Variable)
_VARIABLES = (nnx.Variable,)


def is_object(value: object) -> bool:
    """Returns whether `value` is a module, an optimizer, a metric, Rngs or a variable."""
    return _is_of(value, _OBJECTS)


def is_variable(value: object) -> bool:
    """Returns whether `value` is a variable."""
    return _is_of(value, _VARIABLES)


def _is_of(value: object, types: tuple[type, ...]) -> bool:
    known = _is_of_type(type(value), types)
    return isinstance(value, types) if known is None else known


@functools.lru_cache(maxsize=4096)
def _is_of_type(kind: type, types: tuple[type, ...]) -> bool | None:
    """Returns whether values of type `kind` are of `types`; None: each value says it itself."""
    # A variable made with hijax=True is of another type, and a tracer may stand for one.
    if issubclass(kind, (Tracer, nnx.variablelib.HijaxVariable)):
        return None
    return issubclass(kind, types)


# -- strategy of --------------------------------------------------------------
# Which strategy NNX objects were placed for.


# Keyed by id, since objects may define equality, and weak, so that they can die.
_strategies: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}
#: The same for those that a strategy met in a `dj.jit` and that were not placed: to be described.
_met: dict[int, tuple[weakref.ref[Any], weakref.ref[Any]]] = {}


def strategy_of(node: PyTree) -> Any:
    """Returns the live strategy that `node` was placed for, or None."""
    entry = _strategies.get(id(node))
    return None if entry is None or entry[0]() is not node else entry[1]()


def common_strategy(objects: Sequence[Any]) -> Any:
    """Returns the strategy that all placed modules in `objects` share, or None."""
    owners = {strategy_of(node) for node in objects if isinstance(node, nnx.Pytree)} - {None}
    return owners.pop() if len(owners) == 1 else None


def objects_of(strategy: StrategyLike) -> list[Any]:
    """Returns the live modules that `strategy` uses: placed for it, or met in a `dj.jit`."""
    placed = _of(_strategies, strategy)
    return [*placed, *(node for node in _of(_met, strategy) if strategy_of(node) is None)]


def _of(records: dict[int, Any], strategy: StrategyLike) -> list[Any]:
    entries = [(node(), owner()) for node, owner in list(records.values())]
    return [node for node, owner in entries if node is not None and owner is strategy]


def note_met(nodes: Sequence[Any]) -> None:
    """Notes whose modules are in a trace that is ending, which they do not stay."""
    for node in nodes:
        owner, key = strategy_of(node), id(node)
        if owner is not None:
            forget = weakref.ref(node, lambda _, key=key: _met.pop(key, None))
            _met[key] = (forget, weakref.ref(owner))


def assign_strategy(objects: Sequence[Any], strategy: StrategyLike, is_known: bool) -> None:
    """Records that all modules in `objects` are placed for `strategy`; or raises, and records none.

    Those that were placed for an equal strategy, as by a notebook cell that has run again, become
    modules of this one. If the graph `is_known`, as it is now, under `strategy`, the records of the
    objects themselves speak for all modules in them. (Variables have none.)
    """
    own = [node for node in objects if isinstance(node, nnx.Pytree)]
    if (is_known or not own) and all(strategy_of(node) is strategy for node in own):
        return
    nodes = [n for _, n in nnx.iter_graph(tuple(objects)) if isinstance(n, nnx.Pytree)]
    for node in (*objects, *nodes):  # the user's own object is named first
        owner = strategy_of(node)
        if owner is not None and owner is not strategy and not are_equal(owner, strategy):
            raise StrategyMismatchError(_other_strategy_text(node, owner, strategy))
    for node in nodes:
        _assign(node, strategy)


def assign_unassigned(nodes: Sequence[Any], strategy: StrategyLike) -> None:
    """Records `strategy` for the modules in `nodes` that have none."""
    for node in nodes:
        if strategy_of(node) is None:
            _assign(node, strategy)


def _assign(node: PyTree, strategy: StrategyLike) -> None:
    key = id(node)
    forget = weakref.ref(node, lambda _: _strategies.pop(key, None))
    _strategies[key] = (forget, weakref.ref(strategy))


def strategy_records(nodes: Sequence[Any]) -> dict[int, Any]:
    """Returns the records of modules, to be restored by `put_back_strategies`."""
    return {id(node): _strategies.get(id(node)) for node in nodes}


def forget_strategies(nodes: Sequence[Any]) -> None:
    """Forgets which strategy modules were placed for."""
    for node in nodes:
        _strategies.pop(id(node), None)


def put_back_strategies(records: dict[int, Any]) -> None:
    """Restores records; idempotent."""
    for key, record in records.items():
        if record is None:
            _strategies.pop(key, None)
        else:
            _strategies[key] = record


def _other_strategy_text(node: object, owner: StrategyLike | None, strategy: StrategyLike) -> str:
    other = repr(owner)
    if other == repr(strategy):
        other = "another strategy of this description, with other devices or options"
    return message(
        f"{type(node).__name__} needs to be placed for the strategy that uses it, {strategy!r}",
        got=f"one that was placed for {other}",
        why="Mixing different tf.distribute.Strategy objects: its arrays live where the other "
        "strategy put them",
        fix="use one strategy, or move the object to this one: with strategy.scope(): "
        "dj.flax.place(model)",
    )


# -- graph cache --------------------------------------------------------------
# Graph cache: flattens NNX objects again only if their graph may have changed.
#
# Flattening visits every attribute of every module, and looking up a plan hashes the graph;
# together they would dominate the call of a small step. So a flat graph is cached while its
# objects live, with a fingerprint that is cheap to check.


class FlatGraph:
    """The result of `nnx.graph.flatten` for some objects, in graph order.

    Variables alone, as those of an `nnx.State`, are new objects at each call and no graph is cached
    for them: theirs is only built if it is asked for.

    Attributes:
      key: equal for equal graphs; hashable if their metadata are.
      variables: their variables and bare arrays.
      last_lookup: the key and the result of the last plan lookup with this graph.
    """

    def __init__(self, objects: Sequence[Any]):
        self.has_modules = not all(map(is_variable, objects))
        self.variables: list[Any] = list(objects)
        if self.has_modules:
            self.graphdef, flat = nnx.graph.flatten(tuple(objects), graph=True)
            self.key: Any = self.graphdef
            self.paths: Sequence[tuple[Any, ...]] = flat.paths
            self.variables = list(flat.leaves)
        else:
            self.key = tuple((type(v), *sorted(v.get_metadata().items())) for v in objects)
            self.paths = [(i,) for i in range(len(objects))]
        self.last_lookup: tuple[Any, Any] = (None, None)

    @functools.cached_property
    def graphdef(self) -> Any:
        """The graph; built when it is asked for if there are only variables."""
        return nnx.graph.flatten(tuple(self.variables), graph=True)[0]


def path_of(objects: Sequence[Any], path: Sequence[Any]) -> str:
    """Returns a path in the graph of `objects` as users write it: "Model.linear.kernel"."""
    return ".".join([type(objects[path[0]]).__name__, *map(str, path[1:])])


def flatten_graph(objects: Sequence[Any]) -> FlatGraph:
    """Returns the flat graph of objects, from the cache if it is still valid."""
    key = tuple(map(id, objects))
    known = _graphs.get(key)
    if known is not None and known[1].holds():
        return known[0]
    found = FlatGraph(objects)
    is_cached = found.has_modules and not jax_compat.tracing()
    fingerprint = _take_fingerprint(objects, found) if is_cached else None
    if fingerprint is None:
        _graphs.pop(key, None)
    else:
        forget = [weakref.ref(o, lambda _: _graphs.pop(key, None)) for o in objects]
        _graphs[key] = found, fingerprint, forget
    return found


def references(objects: Sequence[Any]) -> Any:
    """Returns the graph indices of objects and their variables, for writing back."""
    numbers = nnx.graph.RefMap()
    nnx.graph.flatten(tuple(objects), ref_index=numbers, graph=True)
    return numbers


# Keyed by the ids of the objects; an entry is removed when one of its objects dies.
_graphs: dict[tuple[int, ...], tuple[FlatGraph, _GraphFingerprint, Any]] = {}


def _take_fingerprint(objects: Sequence[Any], found: FlatGraph) -> _GraphFingerprint | None:
    """Returns a fingerprint of the graph, or None if it cannot be cached."""
    graph = [node for _, node in nnx.iter_graph(tuple(objects), graph=True)]
    nodes = [n for n in graph if nnx.graph.is_graph_node(n) and not isinstance(n, nnx.Variable)]
    is_of_modules = all(isinstance(node, nnx.Pytree) for node in (*objects, *nodes))
    if not is_of_modules or not all(isinstance(v, nnx.Variable) for v in found.variables):
        return None
    try:
        hash(found.graphdef)
    except TypeError:  # looking up the plan raises an error that names the attribute
        return None
    return _GraphFingerprint(nodes, found.variables)


class _GraphFingerprint:
    """Detects whether a graph has changed. It holds the modules weakly: the cache keeps none alive.

    It has not if each module has the same attributes, each the same object; mutable values (a dict,
    the state of an optimizer) hold the same parts; and the metadata and the hashes of static values
    are equal.
    """

    def __init__(self, nodes: Sequence[Any], variables: Sequence[Any]):
        self._variables = variables
        self._metadata = [v.get_metadata() for v in variables]
        self._types = {type(part) for part in (*nodes, *variables)}
        self._nodes = [self._attributes(node) for node in nodes]
        structure, parts = self._parts_now()
        self._structure, self._parts = structure, [*map(id, parts)]
        # References to the values compared by id, so that no other object reuses the id.
        self._static = [x for x in parts if type(x) not in self._types]
        self._static += [x for metadata in self._metadata for x in metadata.values()]
        for node in nodes:
            self._static += filter(self._is_static, vars(node).values())
        self._hashed = [x for x in self._static if type(x) not in _IMMUTABLE]
        self._hashes = [*map(hash, self._hashed)]

    def holds(self) -> bool:
        """Returns whether the graph is still what it was when the fingerprint was taken."""
        for weak, names, ids, _ in self._nodes:
            node = weak()
            if node is None or [*vars(node)] != names or [*map(id, vars(node).values())] != ids:
                return False
        structure, parts = self._parts_now()
        return (
            structure == self._structure
            and [*map(id, parts)] == self._parts
            and [v.get_metadata() for v in self._variables] == self._metadata
            and [*map(hash, self._hashed)] == self._hashes
        )

    def _attributes(self, node: PyTree) -> tuple[weakref.ref[Any], list[str], list[int], list[str]]:
        """Returns a reference to the module, its attributes' names and ids, its trees' names."""
        own = vars(node)
        trees = [k for k, x in own.items() if not (self._is_part(x) or self._is_static(x))]
        return weakref.ref(node), [*own], [*map(id, own.values())], trees

    def _parts_now(self) -> tuple[Any, list[Any]]:
        """Returns the structure and leaves of all attributes that are trees."""
        trees = [vars(node())[name] for node, _, _, names in self._nodes for name in names]
        parts, structure = jax.tree.flatten(trees, is_leaf=self._is_part)
        return structure, parts

    def _is_part(self, value: object) -> bool:
        return type(value) in self._types

    def _is_static(self, value: object) -> bool:
        """Returns whether `value` holds no parts and cannot gain any in place."""
        if self._is_part(value):
            return False
        if isinstance(value, tuple):
            return all(map(self._is_static, value))
        parts, structure = jax.tree.flatten(value, is_leaf=self._is_part)
        is_one = bool(parts) and jax.tree_util.treedef_is_leaf(structure)  # not so an empty list
        return value is None or is_one


#: Types of static values that cannot change in place and so need no hash.
_IMMUTABLE = {
    bool,
    int,
    float,
    str,
    type,
    type(None),
    type(flatten_graph),
    nnx.graph.HashableMapping,
}


# -- static attributes --------------------------------------------------------
# Checks of the static attributes of NNX objects, which are part of a program's key.


class _Attribute(NamedTuple):
    owner: str
    name: str
    value: Any


def require_hashable(objects: Sequence[Any]) -> None:
    """Raises for static attributes or metadata that cannot be part of a program's key."""
    for owner, name, value in _static_attributes(objects):
        _require_hashable(
            f"{owner}.{name} needs a static value that is hashable",
            value,
            got=describe_value(value),
            why="a program is compiled for the static attributes of a module, and looked up by "
            "them",
            fix=f"self.{name} = tuple(...), or nnx.List([...]) where it holds modules",
        )
    for path, node in nnx.iter_graph(tuple(objects)):
        if isinstance(node, nnx.Variable):
            for name, value in node.get_metadata().items():
                _require_hashable(
                    f"{path_of(objects, path)} needs metadata that is hashable",
                    value,
                    got=f"{name}={describe_value(value)}",
                    why="a program is compiled for the metadata of a variable, and looked up by it",
                    fix=f"variable.set_metadata({name}=tuple(...)), or a tuple where the variable "
                    "is made",
                )


def _require_hashable(needs: str, value: object, **texts: str) -> None:
    try:
        hash(value)
    except TypeError as error:
        raise TypeError(message(needs, **texts)) from error


def require_no_traced_values(objects: Sequence[Any]) -> None:
    """Raises for a static attribute that a step has set to a traced array."""
    for attribute in _static_attributes(objects):
        if any(isinstance(x, jax_compat.Tracer) for x in jax.tree.leaves(attribute.value)):
            raise TraceLeakError(
                f"{attribute.owner}.{attribute.name} needs to be a variable to hold an array "
                "that a step computes",
                got="an array set as a new attribute of the module",
                why="inside a trace Flax keeps a new attribute as static, and an array of a "
                "trace has no value when the step has run",
                fix=f"self.{attribute.name} = nnx.Variable(jnp.zeros(...)) in __init__, and "
                f"model.{attribute.name}[...] = ... in the step",
            )


def _static_attributes(objects: Sequence[Any]) -> Iterator[_Attribute]:
    for _, node in nnx.iter_graph(tuple(objects)):
        if isinstance(node, nnx.Pytree):
            is_data = node._pytree__nodes  # pyright: ignore[reportPrivateUsage]
            for name, value in vars(node).items():
                if not is_data.get(name, False) and not name.startswith("_pytree__"):
                    yield _Attribute(type(node).__name__, name, value)


# -- host reads ---------------------------------------------------------------
# Copies variables in host memory to the devices when code outside a program reads them.
#
# Such code (a call of the model, `nnx.jit`) computes on the devices, and JAX rejects operands
# in different memories. So a hook in the variable's metadata, which Flax applies to each read,
# copies the value. In a step, whose values are on the devices, it changes nothing.


_HOOKS = "on_get_value"  # Flax's metadata key; its value is a function or a tuple of them


class _Hooks(tuple[Any, ...]):
    """Hooks of which Flax does not warn.

    `nnx.Optimizer` gives its state the metadata of the parameters, and Flax warns that hooks are
    deprecated where a new variable has any (where their truth value is true): hooks that the user
    has never heard of. Flax calls them whatever their truth value is.
    """

    def __bool__(self) -> bool:
        return False


def on_devices(variable: nnx.Variable[Any], value: PyTree) -> Any:
    """Returns the value read from a variable, with host arrays copied to their devices."""
    del variable
    return jax.tree.map(_on_devices, value)


def _on_devices(x: PyTree) -> Any:
    if isinstance(x, jax.Array) and jax.typeof(x).memory_space is jax.memory.Space.Host:
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def add_hooks(variables: Iterable[Any]) -> bool:
    """Adds the hook to those of `variables` that lack it; returns whether any did."""
    bare = [v for v in variables if on_devices not in _hooks(v)]
    for variable in bare:
        variable.set_metadata(_HOOKS, _Hooks((on_devices, *_hooks(variable))))
    return bool(bare)


def is_in_host_memory(variable: nnx.Variable[Any]) -> bool:
    """Returns whether an array of a variable is in host memory."""
    arrays = jax.tree.leaves(variable.get_raw_value())
    return any(isinstance(x, jax.Array) and is_host_memory(x.sharding) for x in arrays)


def _hooks(variable: nnx.Variable[Any]) -> tuple[Any, ...]:
    hooks = variable.get_metadata().get(_HOOKS, ())
    return hooks if isinstance(hooks, tuple) else (hooks,)


# -- trace level --------------------------------------------------------------
# Flax's marks of the trace that may change an object, and the cause of its error.
#
# Flax marks each object with the trace that it was made in, and refuses to change it in
# another. While a step is traced, distjax gives the step's objects the mark of that trace. An
# object that distjax did not find keeps its own, and Flax's error does not say how to fix that.


#: The mark of objects made outside all traces; this module may be imported inside one.
with jax_compat.outside_traces():
    _OUTSIDE = tracers.TraceState()
#: The local names under which Flax's functions hold the object they refuse to change.
_NAMES = ("self", "value")


def is_outside(node: object) -> bool:
    """Returns whether a module or variable is marked as made outside all traces."""
    return _OUTSIDE in _marks(node)


def _marks(node: object) -> list[tracers.TraceState]:
    """Returns the mark that Flax has given a module or variable."""
    if isinstance(node, nnx.Variable):
        parts = [*node.__getstate__().values()]
    else:
        states = [x for x in vars(node).values() if isinstance(x, pytreelib.PytreeState)]
        parts = [state.trace_state for state in states]
    return [part for part in parts if isinstance(part, tracers.TraceState)]


def explain(error: Exception) -> TraceLeakError | None:
    """Returns an error that explains Flax's refusal to change an object, or None."""
    node = refused_outside(error)
    return None if node is None else not_found(node)


def refused_outside(error: Exception) -> PyTree | None:
    """Returns the object, made outside all traces, that Flax refused to change, or None."""
    return next(filter(is_outside, _refused(error)), None)


def explain_here(error: Exception) -> TraceLeakError | None:
    """Returns an error for a write to the current trace's objects in an inner trace, or None.

    Here distjax did find the object, but the body of a scan, for example, writes to it.
    """
    here = tracers.TraceState()
    node = next((node for node in _refused(error) if here in _marks(node)), None)
    if node is None:
        return None
    modules = {frame.f_globals.get("__name__") for frame in _frames(error)}
    if merge.__name__ in modules:
        return _in_merge(node)
    steps = traceback.walk_tb(error.__traceback__)
    calls = [SourceFrame(f.f_code.co_qualname, f.f_code.co_filename, n) for f, n in steps]
    return _in_inner_trace(node, find_line(reversed(calls)) or UNKNOWN)


def _refused(error: Exception) -> list[PyTree]:
    """Returns the object that Flax refused to change; empty if `error` is about something else."""
    frames = _frames(error)
    if "different trace level" not in str(error) or not frames:
        return []
    held = [frames[-1].f_locals.get(name) for name in _NAMES]
    return [node for node in held if is_object(node)]


def _frames(error: Exception) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _in_merge(node: PyTree) -> TraceLeakError:
    return TraceLeakError(
        f"an nnx.{type(node).__name__} needs to be changed in the trace that it belongs to",
        got="a write in a merge function",
        why="a merge function is traced apart from the step, and only what it returns and the "
        "dj.Variables that it writes come back to the step",
        fix="reduce in the merge function, return the result, and change the object after "
        "merge_call: optimizer.update(model, ctx.merge_call(reduce_grads, args=(grads,)))",
    )


def _in_inner_trace(node: PyTree, line: str) -> TraceLeakError:
    return TraceLeakError(
        f"an nnx.{type(node).__name__} needs to be changed in the trace that it belongs to",
        got="a write in the body of a gradient, a scan, a branch or what else JAX traces by "
        f"itself, at {line}",
        why="the body is traced once, apart from the step, and JAX knows nothing of the "
        "object: what it writes is neither a carry nor a result",
        fix="nnx.grad, nnx.scan, nnx.cond or nnx.jit with the object as an argument; or graphdef, "
        "state = nnx.split(model) before, nnx.merge(graphdef, state, copy=True) in the body, its "
        "nnx.state as a carry or result, and nnx.update(model, state) after",
    )


def run_in_another_trace(node: PyTree) -> TraceLeakError:
    """Returns the error for an object that would have to hold values of a trace around the run."""
    return TraceLeakError(
        f"an nnx.{type(node).__name__} needs to be changed in the trace that it belongs to",
        got="a step that changes it, run in a function that jax.jit or another transformation "
        "traces",
        why="its new values are those of that trace, and it was made outside of it",
        fix="strategy.run without jax.jit around it, since it compiles the step itself; or dj.jit "
        "in its place",
    )


def not_found(node: PyTree) -> TraceLeakError:
    """Returns the error for an object that a step uses but distjax did not find."""
    return TraceLeakError(
        f"an nnx.{type(node).__name__} that a step uses needs to be an argument, or captured "
        "where distjax can see it",
        got="one that was found neither among the arguments nor in what the function refers to",
        why="distjax searches arguments, closures, globals that the code names and attributes "
        f"of your objects, {MAX_DEPTH} deep; what it does not find it cannot write back",
        fix="pass the object: strategy.run(step, args=(model, batch))",
    )
