"""Creates NNX objects placed as a strategy wants them, and moves existing ones there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distjax._src import jax_compat
from distjax._src.cluster.ledger import phase
from distjax._src.cluster.meeting import ComparedFact, agree, describe_program
from distjax._src.context import ExtendedLike, StrategyLike, frames
from distjax._src.flax import specs
from distjax._src.flax.graphs import (
    forget_strategies,
    is_object,
    is_outside,
    path_of,
    put_back_strategies,
    refused_outside,
    strategy_of,
    strategy_records,
)
from distjax._src.flax.plans import layout_of, place_array, place_objects, raw_value
from distjax._src.placement import PerReplica, is_per_replica, require_same_topology, transfer
from distjax._src.replica.arguments import is_array
from distjax._src.strategies.values import place_rows, require_rows
from distjax._src.traces import struct
from distjax._src.typing import PyTree
from distjax._src.variables.layouts import Layout
from distjax.errors import ContextError, LocalityError, TraceLeakError, describe_value, message

T = TypeVar("T")


def create(fn: Callable[[], T], *, rules: specs.Rules | None = None) -> T:
    """Returns the result of ``fn``, with its arrays created where the strategy keeps them.

    The constructor is traced, and one compiled program creates all arrays, each with its
    own output sharding. So a split parameter is never materialized whole on one device.

    Args:
      fn: returns a module, an optimizer, or a tree of such: `lambda:
        Model(rngs=nnx.Rngs(0))`. Traced twice.
      rules: which arrays the devices of a replica split, by path, as in `place`.

    Arrays with Flax's partitioning metadata, as from `nnx.with_partitioning`, are split over the
    model axes of the same names; `nnx.logical_axis_rules` around the call maps other names.

    Locality: parameters V, the rest M. Context: cross-replica or default; without an
      active strategy, returns ``fn()``.

    Raises:
      TraceLeakError: ``fn`` changes or returns an NNX object that was made outside of it.
      ValueError: ``fn`` returns no NNX object, or a sharding that does not fit.

    Example:
      >>> from flax import nnx
      >>> strategy = dj.ShardedStrategy(jax.devices()[:2], partition="parameters")
      >>> with strategy.scope():
      ...     model = dj.flax.create(lambda: nnx.Linear(400, 300, rngs=nnx.Rngs(0)))
      >>> model.kernel[...].addressable_shards[0].data.shape
      (200, 300)
    """
    if not frames.current().has_strategy:
        built = fn()
        specs.write(_objects(built), rules, None)
        return built
    strategy = frames.current().strategy
    frames.require_cross_replica(strategy, "flax.create")
    initial, found = make_initializer(fn, strategy, rules)
    with phase("creating modules"):
        arrays = initial()
    arrays = [place_array(x, layout) for x, layout in zip(arrays, found.layouts, strict=True)]
    (built,) = nnx.graph.unflatten(found.graphdef, found.treedef.unflatten(arrays))
    place_objects(_objects(built), strategy)
    return built


@dataclasses.dataclass
class TracedConstructor:
    """What tracing a constructor finds: the graph, and where its arrays will live."""

    graphdef: Any = None
    treedef: Any = None
    layouts: Sequence[Layout | None] = ()


def make_initializer(
    fn: Callable[[], Any], strategy: StrategyLike, rules: specs.Rules | None = None
) -> tuple[Any, TracedConstructor]:
    """Returns a function that makes all arrays, and what its trace found.

    For devices that only compile it makes what stands for the arrays.
    """
    found = TracedConstructor()

    def initial() -> list[jax.Array]:
        built = _build(fn)
        if not _objects(built):
            raise ValueError(_no_objects_text("create", built))
        specs.write(_objects(built), rules, strategy.extended.topology)
        specs.keep_logical_rules(_objects(built))
        graphdef, flat = nnx.graph.flatten((built,), graph=True)
        for path, variable in zip(flat.paths, flat.leaves, strict=True):
            if not isinstance(variable, nnx.Variable):
                continue
            if is_outside(variable):
                raise TraceLeakError(_outside_text(variable, path[1:]))
            _require_spec_that_fits(strategy, variable, path[1:])
        arrays, treedef = jax.tree.flatten([raw_value(v) for v in flat.leaves])
        layouts = [
            layout_of(strategy, v, jnp.shape(x), jnp.result_type(x))
            for v in flat.leaves
            for x in jax.tree.leaves(raw_value(v))
        ]
        found.graphdef, found.treedef, found.layouts = graphdef, treedef, layouts
        return [_to_stored(x, layout) for x, layout in zip(arrays, layouts, strict=True)]

    shapes = jax.eval_shape(initial)
    # JAX cannot give an empty output a sharding: the caller places those.
    shardings = [
        layout.sharding if layout is not None and x.size else None
        for x, layout in zip(shapes, found.layouts, strict=True)
    ]
    pairs = list(zip(shapes, shardings, strict=True))
    if any(s is not None and jax_compat.only_compiles(s.device_set) for s in shardings):
        return (lambda: [struct(x.shape, x.dtype, s) for x, s in pairs]), found
    jitted = jax.jit(initial, out_shardings=shardings)
    if any(s is not None and not s.is_fully_addressable for s in shardings):
        agree(
            "dj.flax.create",
            [ComparedFact("the initial values", describe_program(jitted.lower()))],
        )
    return jitted, found


def _require_spec_that_fits(
    strategy: StrategyLike, variable: nnx.Variable[Any], path: Sequence[Any]
) -> None:
    """Raises a ValueError that names the variable, if what its metadata split does not fit."""
    name = f"{type(variable).__name__} {'.'.join(map(str, path))}"
    for x in jax.tree.leaves(raw_value(variable)):
        specs.spec_of_variable(variable, jnp.shape(x), strategy.extended.topology, name)


def _build(fn: Callable[[], Any]) -> Any:
    try:
        with nnx.use_eager_sharding(False):  # which would need a mesh, and ours is not in force
            return fn()
    except Exception as error:
        node = refused_outside(error)
        if node is None:
            raise
        raise TraceLeakError(_outside_text(node, ())) from error


def _outside_text(node: PyTree, path: Sequence[Any]) -> str:
    where = f", at {'.'.join(map(str, path))} of the result" if path else ""
    return message(
        "create needs a constructor that makes what it uses and returns",
        got=f"an nnx.{type(node).__name__} that was made outside of it{where}",
        why="the constructor is traced, and one program makes all arrays: an object from outside "
        "would be copied, and Flax does not let a trace change it, as drawing a key of Rngs does",
        fix="dj.flax.create(lambda: Model(rngs=nnx.Rngs(0))), with the Rngs made inside; or, for "
        "objects from outside, dj.flax.place(Model(rngs=rngs))",
    )


def place(module: T, *, rules: specs.Rules | None = None) -> T:
    """Moves the arrays of `module` to where the active strategy keeps them; returns it.

    The first `run` or `dj.jit` under a strategy does the same. A module that was placed for
    another strategy is moved to this one, with everything in it.

    Args:
      module: an existing module, an optimizer, or a tree of such.
      rules: which arrays the devices of a replica split: pattern -> PartitionSpec over the model
        axes, as in ``{"up.kernel": P(None, "model")}``. The first pattern that `re.search`
        finds in the path of a variable, "layers.0.up.kernel", counts; it is written to the
        variable, and the moments of optimizers follow it. Others are as Flax's metadata, or the
        arrays themselves, say. Under a strategy without model axes they split nothing.

    Locality: parameters V, the rest M. Context: cross-replica or default.

    Raises:
      LocalityError: a variable has a value for each replica of other replicas.
      ValueError: `module` contains no NNX object, a rule that finds no variable, or a
        sharding that does not fit.
      TypeError: a rule that is no PartitionSpec.

    Example:
      >>> from flax import nnx
      >>> from jax.sharding import PartitionSpec as P
      >>> strategy = dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2})
      >>> with strategy.scope():
      ...     layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
      ...     layer = dj.flax.place(layer, rules={"kernel": P(None, "model")})
      >>> layer.kernel[...].addressable_shards[0].data.shape
      (4, 3)
    """
    strategy = frames.current().strategy
    objects = _objects(module)
    if not objects:
        raise ValueError(_no_objects_text("place", module))
    has_strategy = frames.current().has_strategy
    specs.write(objects, rules, strategy.extended.topology if has_strategy else None)
    if has_strategy:
        frames.require_cross_replica(strategy, "flax.place")
        _move(objects, strategy)
    return module


def _move(objects: Sequence[Any], strategy: StrategyLike) -> None:
    """Places objects for `strategy`, whatever strategy they were placed for."""
    _require_movable(objects, strategy)
    nodes = [n for _, n in nnx.iter_graph(tuple(objects)) if isinstance(n, nnx.Pytree)]
    before = strategy_records(nodes)
    forget_strategies([n for n in nodes if strategy_of(n) is not strategy])
    try:
        place_objects(objects, strategy)
    except BaseException:
        put_back_strategies(before)
        raise


def _require_movable(objects: Sequence[Any], strategy: StrategyLike) -> None:
    """Raises for a value per replica of other replicas: no other strategy has these."""
    topology = strategy.extended.topology
    _, flat = nnx.graph.flatten(tuple(objects), graph=True)
    for path, variable in zip(flat.paths, flat.leaves, strict=True):
        for leaf in jax.tree.leaves(raw_value(variable), is_leaf=is_per_replica):
            if is_per_replica(leaf) and leaf.topology is not topology:
                kind = type(variable).__name__
                raise LocalityError(
                    f"{path_of(objects, path)} needs one value to be moved to {strategy!r}",
                    got=f"a {kind} with a value for each replica of {leaf.topology!r}",
                    why="another strategy has other replicas, or another number of them",
                    fix=f"nnx.pop(model, nnx.{kind}) before dj.flax.place(model)",
                )


def _objects(tree: PyTree) -> list[Any]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_object) if is_object(x)]


def _to_stored(value: PyTree, layout: Layout | None) -> jax.Array:
    value = jnp.asarray(value)
    return value if layout is None else layout.to_stored(value)


def _no_objects_text(name: str, value: object) -> str:
    return message(
        f"{name} needs NNX objects: a module, an optimizer, or a tree of such",
        got=describe_value(value),
        why="it decides where the variables in them live",
        fix=f"dj.flax.{name}(Model(rngs=nnx.Rngs(0)))"
        if name == "place"
        else "dj.flax.create(lambda: Model(rngs=nnx.Rngs(0)))",
    )


# -- replicated ---------------------------------------------------------------
# Converts to and from trees with the leading axis of `flax.jax_utils.replicate`.


def from_replicated(tree: PyTree, compare: bool = False) -> Any:
    """Converts a tree of [R, ...] arrays to the form that `run` takes.

    Every array becomes a PerReplica, even if its rows are equal: array values never decide
    how a step is compiled. Parameters, whose rows are equal, are better passed through
    `Strategy.first` (or as they were before `replicate`), so that distjax can prove them equal.

    Args:
      tree: as returned by `jax_utils.replicate` and functions under `jax.pmap`.
      compare: whether a leaf whose R rows are equal bit for bit becomes one mirrored
        array [...].

    Locality: unplaced in; T out (M where the rows compare equal). Context: cross-replica.
      Cost: no collective; with `compare`, every leaf is compared on the host.

    Raises:
      ContextError: no strategy is active.
      LocalityError: a leaf whose leading dimension is not R.

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> with strategy.scope():
      ...     tree = dj.flax.from_replicated(
      ...         {"w": np.ones((2, 3)), "mean": np.arange(2.0)}, compare=True)
      >>> tree["w"].shape, type(tree["mean"]).__name__
      ((3,), 'PerReplica')

    Source: flax.jax_utils.
    """
    extended = _require_scope("from_replicated")
    topology = extended.topology

    def take_in(path: tuple[Any, ...], leaf: PyTree) -> Any:
        if not is_array(leaf):
            return leaf
        require_rows(leaf, f"from_replicated: {jax.tree_util.keystr(path)}", topology)
        if compare and _rows_are_equal(leaf):
            return transfer(leaf[0], topology.mirrored)
        return place_rows(extended, leaf)

    return jax.tree_util.tree_map_with_path(take_in, tree)


def to_replicated(tree: PyTree) -> Any:
    """Converts a tree of values to [R, ...] arrays, one row per replica.

    Args:
      tree: a tree of arrays and PerReplica.

    Locality: M or T in; sharded over the replicas out. Context: cross-replica.

    Raises:
      ContextError: no strategy is active.
      LocalityError: a PerReplica of other replicas.

    Example:
      >>> strategy = dj.MirroredStrategy(jax.devices()[:2])
      >>> with strategy.scope():
      ...     dj.flax.to_replicated({"w": jnp.ones(3)})["w"].shape
      (2, 3)

    Source: flax.jax_utils.
    """
    topology = _require_scope("to_replicated").topology

    def give_back(path: tuple[Any, ...], leaf: PyTree) -> Any:
        if isinstance(leaf, PerReplica):
            where = f"to_replicated: {jax.tree_util.keystr(path)}"
            require_same_topology(leaf, topology, where)
            return leaf.stacked
        if not is_array(leaf):
            return leaf
        rows = jnp.broadcast_to(leaf, (topology.num_replicas, *leaf.shape))
        return transfer(rows, topology.per_replica)

    return jax.tree_util.tree_map_with_path(give_back, tree, is_leaf=is_per_replica)


def _require_scope(name: str) -> ExtendedLike:
    """Returns the `extended` of the active strategy, or raises a ContextError."""
    frame = frames.current()
    if frame.has_strategy:
        return frame.strategy.extended
    raise ContextError(
        f"{name} needs the scope of the strategy that runs the step",
        got="a call with no active strategy",
        why="a row belongs to a replica, and the strategy says how many there are and where",
        fix=f"with strategy.scope(): state = dj.flax.{name}(state)",
    )


def _rows_are_equal(leaf: PyTree) -> bool:
    rows = jax.random.key_data(leaf) if jax_compat.is_key_dtype(leaf.dtype) else leaf
    rows = np.asarray(rows)
    return rows[:1].tobytes() * len(rows) == rows.tobytes()
