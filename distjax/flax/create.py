"""Creates NNX objects where a strategy keeps them, and moves existing ones there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact, describe_program
from distjax.cluster.phases import phase
from distjax.context import frames
from distjax.context.contracts import StrategyLike
from distjax.errors import LocalityError, TraceLeakError, describe_value, message
from distjax.flax import strategy_of, trace_level
from distjax.flax.graph_cache import path_of
from distjax.flax.layouts import layout_of, place_array
from distjax.flax.object_types import is_object
from distjax.flax.plans import place_objects, raw_value
from distjax.placement.per_replica import is_per_replica
from distjax.typing import PyTree
from distjax.variables.layouts import Layout

T = TypeVar("T")


def create(fn: Callable[[], T]) -> T:
    """Returns the result of ``fn``, with its arrays created where the strategy keeps them.

    The constructor is traced, and one compiled program creates all arrays, each with its
    own output sharding. So a split parameter is never materialized whole on one device.

    Args:
      fn: returns a module, an optimizer, or a tree of such: `lambda:
        Model(rngs=nnx.Rngs(0))`. Traced twice.

    Locality: parameters V, the rest M. Context: cross-replica or default; without an
      active strategy, returns ``fn()``.

    Raises:
      TraceLeakError: ``fn`` changes or returns an NNX object that was made outside of it.
      ValueError: ``fn`` returns no NNX object.

    Example:
      >>> from flax import nnx
      >>> strategy = dj.ShardedStrategy(jax.devices()[:2], partition="parameters")
      >>> with strategy.scope():
      ...     model = dj.flax.create(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
      >>> model.kernel[...].addressable_shards[0].data.shape
      (2, 3)
    """
    if not frames.current().has_strategy:
        return fn()
    strategy = frames.current().strategy
    frames.require_cross_replica(strategy, "flax.create")
    initial, found = make_initializer(fn, strategy)
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
    fn: Callable[[], Any], strategy: StrategyLike
) -> tuple[Any, TracedConstructor]:
    """Returns a jitted function that makes all arrays, and what its trace found."""
    found = TracedConstructor()

    def initial() -> list[jax.Array]:
        built = _build(fn)
        if not _objects(built):
            raise ValueError(_no_objects_text("create", built))
        graphdef, flat = nnx.graph.flatten((built,), graph=True)
        for path, variable in zip(flat.paths, flat.leaves, strict=True):
            if isinstance(variable, nnx.Variable) and trace_level.is_outside(variable):
                raise TraceLeakError(_outside_text(variable, path[1:]))
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
    jitted = jax.jit(initial, out_shardings=shardings)
    if any(s is not None and not s.is_fully_addressable for s in shardings):
        agree(
            "dj.flax.create",
            [ComparedFact("the initial values", describe_program(jitted.lower()))],
        )
    return jitted, found


def _build(fn: Callable[[], Any]) -> Any:
    try:
        return fn()
    except Exception as error:
        node = trace_level.refused_outside(error)
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


def place(module: T) -> T:
    """Moves the arrays of `module` to where the active strategy keeps them; returns it.

    The first `run` or `dj.jit` under a strategy does the same. A module that was placed for
    another strategy is moved to this one, with everything in it.

    Args:
      module: an existing module, an optimizer, or a tree of such.

    Locality: parameters V, the rest M. Context: cross-replica or default.

    Raises:
      LocalityError: a variable has a value for each replica of other replicas.
      ValueError: `module` contains no NNX object.
    """
    strategy = frames.current().strategy
    objects = _objects(module)
    if not objects:
        raise ValueError(_no_objects_text("place", module))
    if frames.current().has_strategy:
        frames.require_cross_replica(strategy, "flax.place")
        _move(objects, strategy)
    return module


def _move(objects: Sequence[Any], strategy: StrategyLike) -> None:
    """Places objects for `strategy`, whatever strategy they were placed for."""
    _require_movable(objects, strategy)
    nodes = [n for _, n in nnx.iter_graph(tuple(objects)) if isinstance(n, nnx.Pytree)]
    before = strategy_of.records(nodes)
    strategy_of.forget([n for n in nodes if strategy_of.strategy_of(n) is not strategy])
    try:
        place_objects(objects, strategy)
    except BaseException:
        strategy_of.put_back(before)
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
                    message(
                        f"{path_of(objects, path)} needs one value to be moved to {strategy!r}",
                        got=f"a {kind} with a value for each replica of {leaf.topology!r}",
                        why="the replicas of another strategy are others, or another number",
                        fix=f"nnx.pop(model, nnx.{kind}) before dj.flax.place(model)",
                    )
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
