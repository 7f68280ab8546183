"""dj.pmap: the semantics of `jax.pmap`, as a layer on `strategy.run` and `dj.jit`.

A call finds its replicas (those of `strategy`, of the active strategy, or one for each row on the
local devices) and calls one `dj.jit` function for them. Inside it, rows become per-replica values,
`run` runs the function on them, and results are stacked: the call itself touches no array.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from distjax._src import hooks, user_lines
from distjax._src.collectives.mapping import constrain_to_replicas
from distjax._src.context import (
    Finding,
    Frame,
    StrategyLike,
    expect,
    frames,
    reason_in,
    report,
    require_strategy,
)
from distjax._src.jax_compat import JaxprEqn, Tracer
from distjax._src.objects.stateful import ResultTree, is_stateful, take_apart
from distjax._src.placement import (
    REPLICA_AXIS,
    PerReplica,
    Topology,
    local_devices,
    require_axis_name,
    require_held,
    take_local,
)
from distjax._src.program.jit import (
    CompiledFunction,
    LoweredProgram,
    add_cause_note,
    as_numbers,
    jit,
)
from distjax._src.replica.arguments import (
    FIX_OF_UNHASHABLE,
    Static,
    as_static,
    function_name,
    is_array,
    is_array_or_struct,
    is_one_leaf,
    positional_names,
    require_callable,
    require_finished,
    user_path,
)
from distjax._src.replica.global_value import AlreadyPlaced, GlobalValue, stack_replicas
from distjax._src.replica.trace import TracedRun
from distjax._src.strategies.mirrored import MirroredStrategy
from distjax._src.strategies.strategy import Strategy
from distjax._src.typing import PyTree
from distjax._src.user_lines import keep_user_lines
from distjax._src.variables.conversion import is_number
from distjax._src.variables.storage import first_leaf
from distjax.errors import (
    ContextError,
    LocalityError,
    LocalityWarning,
    describe_value,
    is_int,
    message,
)

#: Why state may come back different: `out_axes` says how each result comes back.
_REASON = "dj.pmap returns a value per replica, or warns where one is returned for all"


class MappedFunction:
    """The result of `dj.pmap`: the function, compiled for the replicas of each call."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mapping: _Mapping,
        devices: tuple[jax.Device, ...] | None,
        strategy: Strategy | None,
        donate_argnums: tuple[int, ...],
    ):
        functools.update_wrapper(self, fn)
        if strategy is not None and strategy.extended.is_default:
            strategy = None
        self._fn, self._mapping = fn, mapping
        self._devices, self._strategy, self._donate_argnums = devices, strategy, donate_argnums
        self._programs: dict[StrategyLike, CompiledFunction] = {}
        self._own: dict[int, Strategy] = {}  # by R, for calls without a strategy

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Runs the program for the call's replicas; in a distjax trace, emits it there."""
        strategy = None
        try:
            args = self._mapping.mark_static(args)
            frame = frames.current()
            strategy = self._find_strategy(frame, args, kwargs)
            if frame.state is not None:
                return _run_on_rows(strategy, self._fn, self._mapping, args, kwargs)
            return self._program_of(strategy)(*args, **kwargs)
        except Exception as error:
            if strategy is not None:
                add_cause_note(error, strategy)
            keep_user_lines(error)
            raise

    def lower(self, *args: PyTree, **kwargs: PyTree) -> LoweredProgram:
        """Returns the program for these arguments, lowered but not run."""
        marked = self._mapping.mark_static(args)
        strategy = self._find_strategy(frames.current(), marked, kwargs)
        lowered: Any = self._program_of(strategy).lower(*marked, **kwargs)
        return LoweredProgram(lowered, self, args, marked, {}, self._mapping.argument_names)

    def as_per_replica(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments of a call with a PerReplica where rows are mapped."""
        args = self._mapping.mark_static(args)
        strategy = self._find_strategy(frames.current(), args, kwargs)
        return self._mapping.per_replica(args, kwargs, strategy.extended.topology)

    def program_for(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledFunction:
        """Returns what compiles a call with these arguments."""
        return self._program_of(self._find_strategy(frames.current(), args, kwargs))

    def __repr__(self) -> str:
        return f"dj.pmap({function_name(self._fn)})"

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        """Binds a decorated method to its object."""
        return self if instance is None else types.MethodType(self, instance)

    def __deepcopy__(self, memo: dict[int, Any]) -> MappedFunction:
        """Returns one that compiles anew; of a method, bound to the copy of its object."""
        fn = copy.deepcopy(self._fn, memo)
        return MappedFunction(
            fn, self._mapping, self._devices, self._strategy, self._donate_argnums
        )

    def _find_strategy(
        self, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StrategyLike:
        """Returns the strategy whose replicas run a call with these arguments."""
        mapping, has_strategy = self._mapping, frame.has_strategy
        if has_strategy and frame.replica_context is not None:
            raise ContextError(_nested_text(mapping.name, frame.name))
        count = mapping.num_rows(args, kwargs)
        if mapping.axis_size not in (None, count):
            raise ValueError(_axis_size_text(mapping, count))
        strategy = frame.strategy if self._strategy is None and has_strategy else self._strategy
        if strategy is None:
            return self._own.get(count) or self._make_own(count)
        if self._devices is not None:
            raise ValueError(_devices_text(strategy))
        if has_strategy:
            frames.require_enterable(strategy, "pmap")
        mapping.require_axis_of(strategy)
        return strategy

    def _make_own(self, count: int) -> Strategy:
        name = self._mapping.name
        if not count:
            raise ValueError(_no_rows_text(name))
        if self._devices is None:
            take_local("pmap without a strategy", "devices=jax.local_devices()")
        devices = local_devices() if self._devices is None else self._devices
        if count > len(devices):
            raise ValueError(_too_few_text(name, count, devices))
        axis_name = self._mapping.axis_name or REPLICA_AXIS
        return self._own.setdefault(count, strategy_of(tuple(devices[:count]), axis_name))

    def _program_of(self, strategy: StrategyLike) -> CompiledFunction:
        program = self._programs.get(strategy)
        if program is None:
            made = _compile(strategy, self._fn, self._mapping, self._donate_argnums)
            program = self._programs.setdefault(strategy, made)
        return program


@functools.cache
def strategy_of(devices: tuple[jax.Device, ...], axis_name: str) -> MirroredStrategy:
    """Returns the strategy on these devices that all calls without a strategy share."""
    return MirroredStrategy(devices, axis_name=axis_name)


def pmap(
    fn: Callable[..., Any],
    axis_name: str | None = None,
    *,
    in_axes: PyTree = 0,
    out_axes: PyTree = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    strategy: Strategy | None = None,
) -> MappedFunction:
    """Returns ``fn`` mapped over rows, one per replica, as `jax.pmap` maps it.

    R is the size of the mapped axes. The replicas are those of `strategy` or of the active
    strategy; without either, one on each of the first R local devices. The body is a replica
    function: `merge_call`, variables and `dj.get_replica_context()` work in it.

    Args:
      fn: the replica function.
      axis_name: the name of the replica axis in this function; None: the strategy's. A strategy
        that is given, or active, needs to have this name: ``MirroredStrategy(axis_name="batch")``.
      in_axes: a prefix of the positional arguments: the axis of the rows, or None for a
        value shared by all replicas. Keyword arguments use axis 0.
      out_axes: a prefix of the results: the position of their replica axis, or None for one
        value. If that is not proved equal, replica 0's is returned with a LocalityWarning,
        which `dj.expect` silences.
      static_broadcasted_argnums: numbers of positional arguments that are Python values,
        compiled into the program.
      devices: the replicas' devices; the first R are used.
      backend: the backend whose local devices are used if `devices` is None.
      axis_size: R again, to be checked.
      donate_argnums: positional arguments whose buffers the program may reuse; -1 is the last.
      strategy: the strategy to run on; it must have R replicas.

    Locality: in: rows, a PerReplica, or M for None; out: stacked, or M for None.
    Context: cross-replica or default; also inside `dj.jit`, `jit`, `vmap`, `grad` and loops.
    Cost: as for `run`. Source: jax.pmap.

    Raises:
      TypeError: not a function; an axis that is not an int.
      ValueError: the number of rows is not that of replicas, exceeds that of devices, or is 0;
        axes that do not fit; an unhashable static argument; an axis name that is not a string, or
        not that of the strategy.
      LocalityError: a PerReplica where the axis is None.
      ContextError: inside another replica function.

    Example:
      >>> step = dj.pmap(lambda x: x / jax.lax.psum(x, "i"), axis_name="i")
      >>> step(jnp.arange(4.0))
      Array([0.        , 0.16666667, 0.33333334, 0.5       ], dtype=float32)
    """
    require_callable(fn, "pmap")
    name, names = function_name(fn), positional_names(fn)
    if axis_name is not None:
        require_axis_name(axis_name, "dj.pmap(fn, axis_name='batch')")
    static = as_numbers(static_broadcasted_argnums, "static_broadcasted_argnums", "pmap", 0)
    donated = as_numbers(donate_argnums, "donate_argnums", "pmap", -len(names))
    donated = tuple(n + len(names) if n < 0 else n for n in donated)  # counted from the last
    if set(static) & set(donated):
        raise ValueError(_both_text(static, donated))
    mapping = _Mapping(
        name,
        names,
        axis_name,
        _as_axes(in_axes, "in_axes"),
        _as_axes(out_axes, "out_axes"),
        axis_size,
        frozenset(static),
    )
    own = _own_devices(name, devices, backend, strategy)
    if strategy is not None:
        mapping.require_axis_of(strategy)
    return MappedFunction(fn, mapping, own, strategy, donated)


def _own_devices(
    name: str,
    devices: Sequence[jax.Device] | None,
    backend: str | None,
    strategy: Strategy | None,
) -> tuple[jax.Device, ...] | None:
    """Returns the devices that the user named for the replicas, or None."""
    require_strategy(strategy, "pmap")
    if devices is None and backend is None:
        return None
    if strategy is not None:
        raise ValueError(_devices_text(strategy))
    devices = jax.local_devices(backend=backend) if devices is None else devices
    if not len(devices):
        raise ValueError(_too_few_text(name, 1, ()))
    return tuple(devices)


def _as_axes(axes: PyTree, argument: str) -> Any:
    """Returns `in_axes` or `out_axes`, checked; a list of `in_axes` becomes a tuple."""
    leaves = jax.tree.leaves(axes)
    wrong = [x for x in leaves if not is_int(x)]
    negative = [x for x in leaves if is_int(x) and x < 0]
    if not wrong and not negative:
        return tuple(axes) if type(axes) is list and argument == "in_axes" else axes
    raise (TypeError if wrong else ValueError)(
        message(
            f"pmap: {argument} needs ints of 0 or more, None, or a container of these",
            got=f"{wrong or negative} in {axes!r}",
            why="an axis is counted from the front; None stands for a value that all share",
            fix=f"dj.pmap(fn, {argument}=0)",
        )
    )


# -- inside the program ----------------------------------------------------------


def _compile(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    mapping: _Mapping,
    donate_argnums: tuple[int, ...],
) -> CompiledFunction:
    """Returns the program of a mapped function on the replicas of `strategy`."""

    @functools.wraps(fn)
    def on_rows(*args: PyTree, **kwargs: PyTree) -> Any:
        args = mapping.mark_static(args)
        return _run_on_rows(strategy, fn, mapping, args, kwargs, leaves_program=True)

    on_rows.__qualname__ = mapping.name
    return jit(on_rows, donate_argnums=donate_argnums)


def _run_on_rows(
    strategy: StrategyLike,
    fn: Callable[..., Any],
    mapping: _Mapping,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves_program: bool = False,
) -> Any:
    """Runs ``fn`` on every replica, each on its rows, in a distjax trace.

    `leaves_program` says that the results are those of the program, which is not always one of the
    strategy's context: they are marked as already placed.
    """
    topology = strategy.extended.topology
    args, kwargs = mapping.as_values(args, kwargs, topology)

    @functools.wraps(fn)
    def apart(*args: PyTree, **kwargs: PyTree) -> ResultTree:
        # The classes in the user's results never see a PerReplica.
        return take_apart(require_finished(fn(*args, **kwargs), fn))

    apart.__qualname__ = mapping.name
    runs: list[TracedRun] = []
    with hooks.listening((hooks.on_traced, runs.append)):
        result: ResultTree = strategy.run(apart, args, kwargs)
    leaves = _stack(result, mapping, runs[-1], topology)
    if leaves_program:
        leaves = [AlreadyPlaced(x) if isinstance(x, jax.Array) else x for x in leaves]
    return result.treedef.unflatten(leaves)


@dataclasses.dataclass(frozen=True)
class _Mapping:
    """How a function's arguments and results are mapped, as `pmap` was told.

    `axis_size` is R as the user gave it, to be checked.
    """

    name: str
    argument_names: Sequence[str]
    axis_name: str | None
    in_axes: PyTree
    out_axes: PyTree
    axis_size: int | None
    static: frozenset[int]

    def require_axis_of(self, strategy: StrategyLike) -> None:
        """Raises a ValueError unless the strategy's replica axis has the user's name."""
        name = strategy.extended.axis_name
        if self.axis_name in (None, name) or strategy.extended.is_default:
            return
        raise ValueError(
            message(
                f"pmap of {self.name} over axis {self.axis_name!r} needs a strategy whose replica "
                "axis has this name",
                got=f"{strategy!r}, whose axis is {name!r}",
                why="the strategy says what the axis of its replicas is called",
                fix=f"dj.MirroredStrategy(axis_name={self.axis_name!r}); or dj.pmap(fn, {name!r})",
            )
        )

    def mark_static(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the positional arguments, with static ones as Static."""
        if not self.static:
            return args
        if max(self.static) >= len(args):
            raise ValueError(_missing_text(self, len(args)))
        names = dict(enumerate(self.argument_names))
        return tuple(
            as_static(a, names.get(i, f"args[{i}]"), fix=FIX_OF_UNHASHABLE)
            if i in self.static and not isinstance(a, Static)
            else a
            for i, a in enumerate(args)
        )

    def num_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Returns R, the size of the first mapped axis; raises if nothing is mapped."""
        if self.in_axes == 0:  # the common case; a PerReplica exposes its stacked array here
            for arg in args:
                rows = _rows_of(arg)
                if rows is not None:
                    return rows
        for path, leaf, axis in self._leaves(args, kwargs)[1]:
            if axis is not None:
                return _size(leaf, axis, path, self.name)
        raise ValueError(
            message(
                f"pmap of {self.name} requires at least one argument with a mapped axis",
                got=f"in_axes={self.in_axes!r} and {len(args) + len(kwargs)} arguments",
                why="the size of the mapped axes is the number of replicas"
                + ("; axis_size does not stand for it" if self.axis_size is not None else ""),
                fix="map at least one argument, even just jnp.arange(R); or strategy.run(fn, args)",
            )
        )

    def as_values(
        self, args: tuple[Any, ...], kwargs: dict[str, PyTree], topology: Topology
    ) -> tuple[tuple[Any, ...], Any]:
        """Returns the arguments for `run`, with a PerReplica where rows are mapped."""
        args, kwargs = self.per_replica(args, kwargs, topology)
        is_plain = lambda x: isinstance(x, Static)
        return tuple(a if is_plain(a) else expect(_REASON, differs=a) for a in args), kwargs

    def per_replica(
        self, args: tuple[Any, ...], kwargs: dict[str, PyTree], topology: Topology
    ) -> tuple[tuple[Any, ...], Any]:
        """Returns the arguments with a PerReplica where rows are mapped; raises as `as_values`."""
        treedef, leaves = self._leaves(args, kwargs)
        values = [self._as_value(path, leaf, axis, topology) for path, leaf, axis in leaves]
        return jax.tree_util.tree_unflatten(treedef, values)

    def _leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, PyTree]
    ) -> tuple[Any, list[tuple[str, Any, int | None]]]:
        """Returns the tree of (args, kwargs), and each leaf with its path and axis."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_leaf)
        positional, keywords = treedef.children()
        try:
            axes = [
                *_broadcast_axes(self._axes_of(len(args)), positional),
                *[0] * keywords.num_leaves,
            ]
        except ValueError as error:
            raise ValueError(self._prefix_text(error)) from None
        paths = [user_path(jax.tree_util.keystr(path), self.argument_names) for path, _ in pairs]
        return treedef, [
            (path, leaf, axis) for path, (_, leaf), axis in zip(paths, pairs, axes, strict=True)
        ]

    def _axes_of(self, count: int) -> Any:
        """Returns `in_axes` with None for the static arguments."""
        axes = self.in_axes
        if not self.static:
            return axes
        axes = axes if isinstance(axes, tuple) else (axes,) * count
        mapped = [i for i in range(count) if i not in self.static]
        if mapped and mapped[-1] >= len(axes):  # trailing static arguments need no axis
            return axes
        return tuple(None if i in self.static else axes[i] for i in range(count))

    def _as_value(self, path: str, leaf: PyTree, axis: int | None, topology: Topology) -> Any:
        require_held(leaf, f"{path} of {self.name}")
        if axis is None:
            if isinstance(leaf, PerReplica):
                raise LocalityError(_per_replica_text(path, self.name, leaf))
            return leaf
        size = _size(leaf, axis, path, self.name)
        if size != topology.num_replicas:
            raise ValueError(self._rows_text(path, size, axis, topology))
        if isinstance(leaf, PerReplica):
            return leaf
        return PerReplica(jnp.moveaxis(jnp.asarray(leaf), axis, 0), topology)

    def _rows_text(self, path: str, size: int, axis: int, topology: Topology) -> str:
        return message(
            f"pmap of {self.name} needs {topology.num_replicas} rows in each mapped argument, "
            "one for each replica",
            got=f"{size} rows along axis {axis} of argument {path}",
            why="replica r takes row r of every mapped argument; a scope, and strategy=, say whose "
            "replicas run, and without either there are as many as rows",
            fix="x.reshape(num_replicas, -1, *x.shape[1:]) for a batch; in_axes=None for what all "
            "replicas share; or the call outside of the scope",
        )

    def _prefix_text(self, error: ValueError) -> str:
        return message(
            f"pmap: in_axes={self.in_axes!r} needs to be a prefix of the positional arguments of "
            f"{self.name}",
            got=str(error),
            why="each axis in it stands for all arrays below it; each argument passed by keyword "
            "is mapped over its axis 0 and not counted",
            fix="in_axes=0, or a tuple with an axis for each positional argument",
        )


def _rows_of(tree: PyTree) -> int | None:
    """Returns the leading size of an array in `tree`, or None if it has none."""
    shape = getattr(first_leaf(tree), "shape", ())
    return shape[0] if shape else None


def _broadcast_axes(axes: PyTree, treedef: jax.tree_util.PyTreeDef) -> list[Any]:
    """Returns the axis of each leaf of a tree, of which `axes` has to be a prefix."""
    if not axes and not isinstance(axes, (tuple, list, dict)):  # 0 or None: the same everywhere
        return [axes] * treedef.num_leaves
    prefix = jax.tree.structure(axes, is_leaf=_is_none)
    leaves = jax.tree.leaves(axes, is_leaf=_is_none)
    return [
        axis
        for axis, subtree in zip(leaves, _subtrees(prefix, treedef), strict=True)
        for _ in range(subtree.num_leaves)
    ]


def _subtrees(
    prefix: jax.tree_util.PyTreeDef, full: jax.tree_util.PyTreeDef
) -> list[jax.tree_util.PyTreeDef]:
    """Returns the subtrees at the positions of the prefix's leaves."""
    if prefix.node_data() is None:
        return [full]
    if prefix.node_data() != full.node_data() or len(prefix.children()) != len(full.children()):
        raise ValueError(f"{_node_text(prefix)} where the tree has {_node_text(full)}")
    pairs = zip(prefix.children(), full.children(), strict=True)
    return [tree for child, of in pairs for tree in _subtrees(child, of)]


def _node_text(treedef: jax.tree_util.PyTreeDef) -> str:
    node = treedef.node_data()
    if node is None:
        return "a leaf" if treedef.num_leaves else "None"
    return f"a {node[0].__name__} of {len(treedef.children())}"


def _is_none(value: object) -> bool:
    return value is None


def _is_leaf(value: object) -> bool:
    return is_one_leaf(value) or is_stateful(value)


def _size(leaf: PyTree, axis: int, path: str, function: str) -> int:
    """Returns the number of rows of an argument; raises a ValueError if it has none."""
    if isinstance(leaf, PerReplica):
        return leaf.num_replicas
    if is_array_or_struct(leaf) and len(leaf.shape) > axis:
        return leaf.shape[axis]
    got = describe_value(leaf.value if isinstance(leaf, Static) else leaf)
    if isinstance(leaf, Tracer):  # numbers are traced too
        got = f"an array or a number of shape {leaf.shape}"
    fix = "in_axes=None for what all replicas share; static_broadcasted_argnums for a Python object"
    if is_stateful(leaf):
        got = "an object whose state the program writes back: a module or a variable"
        fix = "in_axes=None, as all replicas share it; for rows of an nnx.State: nnx.as_pure(state)"
    raise ValueError(
        message(
            f"pmap of {function} needs an array with rows along axis {axis} as argument {path}",
            got=got,
            why="in_axes says that each replica takes a row of it",
            fix=fix,
        )
    )


def _per_replica_text(path: str, function: str, value: PerReplica) -> str:
    return message(
        f"argument {path} of {function} needs one value for all replicas: its axis is None",
        got=f"a PerReplica of {value.num_replicas} values",
        why="it has a value for each replica",
        fix="in_axes=0 for it; or strategy.reduce('mean', x) for one value",
    )


# -- results ---------------------------------------------------------------------


def _stack(result: ResultTree, mapping: _Mapping, run: TracedRun, topology: Topology) -> list[Any]:
    """Returns the results of `run` with the replica axis as in `out_axes`."""
    try:  # never unflattens user classes with axes as leaves
        axes = _broadcast_axes(mapping.out_axes, result.treedef)
    except ValueError as error:
        raise ValueError(
            message(
                f"pmap: out_axes={mapping.out_axes!r} needs to be a prefix of what {mapping.name} "
                "returns",
                got=str(error).splitlines()[0].removesuffix("."),
                why="each axis in it stands for all results below it",
                fix="out_axes=0, or a tuple with an axis for each result",
            )
        ) from None
    for_all = [path for path, axis in zip(result.paths, axes, strict=True) if axis is None]
    if for_all:
        # With objects, their state follows the results.
        is_all = jax.tree.structure(result, is_leaf=is_one_leaf) == run.traced.result.treedef
        _report_lost(mapping, for_all, run, "" if is_all else "[0]")
    return [_with_axis(x, axis, topology) for x, axis in zip(result.leaves, axes, strict=True)]


def _with_axis(leaf: PyTree, axis: int | None, topology: Topology) -> Any:
    if not (is_array(leaf) or is_number(leaf) or isinstance(leaf, PerReplica)):
        return leaf
    if isinstance(leaf, PerReplica):
        value = GlobalValue(leaf.stacked, True)
    else:
        value = GlobalValue(jnp.asarray(leaf), False)
    if axis is None:
        first = value.array[0] if value.varying else value.array
        return constrain_to_replicas(first, topology, varying=False)
    placed = constrain_to_replicas(stack_replicas(value, topology), topology, varying=True)
    if not axis:
        return placed
    moved = jnp.moveaxis(placed, 0, axis)
    if topology.mesh is None or topology.model_axes:
        return moved
    spec = PartitionSpec(*[None] * axis, topology.axis_name)
    return jax.lax.with_sharding_constraint(moved, NamedSharding(topology.mesh, spec))


def _report_lost(mapping: _Mapping, paths: Sequence[str], run: TracedRun, prefix: str) -> None:
    """Warns where all values but one are dropped, grouped by `dj.expect` reason.

    `prefix` is what comes before the user's paths in the results of the trace.
    """
    jaxpr, own = run.traced.jaxpr, {prefix + path: path for path in paths}
    made_by: dict[Any, JaxprEqn] = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    results = zip(run.traced.result.paths, run.results, jaxpr.outvars, strict=False)
    lost = {
        own[path]: made_by.get(atom)
        for path, value, atom in results
        if value.varying and path in own
    }
    reasons = {
        path: None if eqn is None else reason_in(str(eqn.source_info.name_stack))
        for path, eqn in lost.items()
    }
    axis = "the axis" if mapping.axis_name is None else repr(mapping.axis_name)
    for reason in dict.fromkeys(reasons.values()):
        own = [path for path in lost if reasons[path] == reason]
        origin = lost[own[0]]
        line = "an argument" if origin is None else user_lines.source_line(origin)
        shown = ", ".join(f"result{path}" for path in own[:8])
        more = f" and {len(own) - 8} more" if len(own) > 8 else ""
        text = message(
            f"{mapping.name} needs to return what is equal on every replica where out_axes is None",
            got=f"values that differ per replica at {shown}{more}; made different at {line}",
            why="one value comes back for all: that of replica 0, and the others are lost",
            fix=f"jax.lax.pmean(x, {axis}) of the gradients, or of the value itself; out_axes=0 "
            "for a value per replica",
        )
        rule = "one value of those that differ"
        report(Finding("warning", rule, text, line, reason), LocalityWarning)


# -- error texts -----------------------------------------------------------------


def _no_rows_text(function: str) -> str:
    return message(
        f"pmap of {function} needs a row for each replica",
        got="0 rows in the mapped arguments",
        why="without a strategy there are as many replicas as rows",
        fix="leave the call out where there is no data",
    )


def _both_text(static: Sequence[int], donated: Sequence[int]) -> str:
    return message(
        "pmap: static_broadcasted_argnums and donate_argnums need to name different arguments",
        got=f"both name {sorted(set(static) & set(donated))}",
        why="a Python value has no buffer to reuse",
        fix="donate_argnums for arrays only",
    )


def _devices_text(strategy: StrategyLike) -> str:
    return message(
        "pmap needs devices, or a backend, or a strategy",
        got=f"devices or a backend, and {strategy!r}, whose replicas have devices of their own",
        why="replicas run where their strategy has them",
        fix="leave devices out; or strategy=dj.MirroredStrategy(devices)",
    )


def _missing_text(mapping: _Mapping, count: int) -> str:
    return message(
        f"pmap: static_broadcasted_argnums={tuple(sorted(mapping.static))} needs all these "
        f"arguments of {mapping.name} by position",
        got=f"{count} positional argument{'' if count == 1 else 's'}",
        why="such an argument is found by its position",
        fix=f"{mapping.name}(x, value), not {mapping.name}(x, name=value)",
    )


def _nested_text(function: str, context: str) -> str:
    return message(
        f"pmap of {function} needs to be outside of replica functions",
        got=f"a call in {context}",
        why="a replica has no replicas of its own (nor has jax.pmap inside jax.pmap)",
        fix=f"one dj.pmap over all rows, with jax.vmap({function}, axis_name=...) in its body for "
        "the inner axis",
    )


def _axis_size_text(mapping: _Mapping, count: int) -> str:
    return message(
        f"pmap: axis_size={mapping.axis_size} needs to be the size of the mapped axes of "
        f"{mapping.name}",
        got=f"{count} rows",
        why="there is one replica for each row",
        fix="leave axis_size out",
    )


def _too_few_text(function: str, count: int, devices: Sequence[jax.Device]) -> str:
    return message(
        f"pmap of {function} needs a device for each row",
        got=f"{count} rows and {len(devices)} devices",
        why="each row is a replica, and each replica has a device of its own",
        fix=f"dj.pmap({function}, strategy=dj.VirtualStrategy({count})) for replicas that share a "
        "device; or rows [num_devices, k, ...] and jax.vmap in the body",
    )
