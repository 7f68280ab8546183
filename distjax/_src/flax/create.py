"""Creates NNX objects placed as a strategy wants them, and moves existing ones there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from distjax._src import jax_compat
from distjax._src.cluster.ledger import phase
from distjax._src.cluster.meeting import ComparedFact, agree, describe_program
from distjax._src.context import StrategyLike, frames
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
from distjax._src.placement import is_per_replica
from distjax._src.traces import struct
from distjax._src.typing import PyTree
from distjax._src.variables.layouts import Layout
from distjax.errors import LocalityError, TraceLeakError, describe_value, message

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
            named = [(".".join(map(str, path[1:])), variable)]
            specs.require_fitting(named, strategy.extended.topology)
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
