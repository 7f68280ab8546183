"""Flattens a tree to leaves by key, and rebuilds it from the value at each key."""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from distjax._src import jax_compat
from distjax._src.checkpoint.leaves import Leaf, VariableLeaf, keeps_own_state, make_leaf
from distjax._src.context import frames
from distjax._src.data.dataset import DistributedDataset
from distjax._src.objects.walk import attributes_of
from distjax._src.placement import is_per_replica
from distjax._src.replica.arguments import is_array_or_struct, is_module
from distjax._src.strategies.default import DefaultExtended
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.strategy import Strategy
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable
from distjax.errors import CheckpointError, ContextError, require

#: Rebuilds a tree from the value at each key.
_Rebuild = Callable[[Mapping[str, Any]], Any]

#: The key of a tree that is a single leaf.
_ROOT_KEY = "value"

#: Objects whose attributes are not part of a user's state.
_CLOSED = (
    *(type, types.FunctionType, types.MethodType, types.ModuleType),
    *(Strategy, StrategyExtended, DefaultExtended),
    DistributedDataset,  # its iterator has the position; the user's dataset may be read ahead
)


@dataclasses.dataclass(frozen=True)
class Tree:
    """The leaves of a tree by key, in order; `rebuilt` makes it again of the value at each key."""

    leaves: dict[str, Leaf]
    rebuilt: _Rebuild


def as_tree(value: PyTree, method: str) -> Tree:
    """Returns the leaves of a pytree, including those inside NNX and distjax objects; or raises.

    Keys are paths joined by "/": ``{"model": [w]}`` has ``model/0``. A variable and an array at one
    place have the same key. `method` is "save" or "restore", for error texts.
    """
    _require_outside(method)
    leaves: list[Leaf] = []
    rebuilt = _visit("", value, leaves)
    counts = collections.Counter(leaf.key for leaf in leaves)
    repeated = sorted(key for key, count in counts.items() if count > 1)
    require(
        not repeated,
        "the tree needs a key of its own for each leaf",
        got=f"several leaves at {', '.join(repeated)}",
        why='a key is the path to the leaf joined by "/", so {"a/b": x, "a": {"b": y}} '
        "has one key for two",
        fix='rename the dict key that has a "/" in it',
        error=CheckpointError,
    )
    for leaf in leaves:
        if isinstance(leaf, VariableLeaf):
            leaf.require_one_value(method)
    return Tree({leaf.key: leaf for leaf in leaves}, rebuilt)


def _visit(prefix: str, value: PyTree, leaves: list[Leaf]) -> _Rebuild:
    """Appends the leaves of `value`, at the key `prefix`; returns what rebuilds it by key."""
    is_leaf = lambda x: _is_node(x) or (is_module(x) and x is not value)
    paths, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
    parts = [
        _visit_node(_join_path(prefix, path), node, leaves, in_module=is_module(value))
        for path, node in paths
    ]
    return lambda values: jax.tree.unflatten(structure, [part(values) for part in parts])


def _visit_node(key: str, node: PyTree, leaves: list[Leaf], *, in_module: bool) -> _Rebuild:
    if is_module(node):
        return _visit(key, node, leaves)
    if _is_nnx(node):
        return _visit_nnx(key, node, leaves)
    inside = _inside_of(node)
    if inside is not None:
        parts = [
            _visit("/".join(part for part in (key, name) if part), child, leaves)
            for name, child in inside
        ]
        # Its contents are restored in place.
        return lambda values: ([part(values) for part in parts], node)[1]
    # As in the arguments of `run`: what is not an array in an Equinox module is part of its code.
    if in_module and not (is_array_or_struct(node) or _is_node(node)):
        return lambda values: node
    leaf = make_leaf(key or _ROOT_KEY, node)
    leaves.append(leaf)
    return lambda values: values[leaf.key]


def _visit_nnx(key: str, node: PyTree, leaves: list[Leaf]) -> _Rebuild:
    """Visits the state of an NNX object (module, Rngs, ...), restored in place."""
    nnx = sys.modules["flax.nnx"]
    state = node if isinstance(node, nnx.State) else nnx.state(node)
    held = lambda x: x.get_raw_value() if isinstance(x, nnx.Variable) else x  # bypass its hooks
    inside = _visit(key, nnx.to_pure_dict(state, held), leaves)

    def rebuilt(values: Mapping[str, Any]) -> Any:
        nnx.replace_by_pure_dict(state, inside(values))
        if node is not state:
            nnx.update(node, state)
        return node

    return rebuilt


def _join_path(prefix: str, path: tuple[Any, ...]) -> str:
    own = jax.tree_util.keystr(path, simple=True, separator="/")
    return "/".join(part for part in (prefix, own) if part)


def _require_outside(method: str) -> None:
    frame = frames.current()
    require(
        not frame.is_replica and frame.state is None and not jax_compat.tracing(),
        f"{method} needs to be called outside of replica functions and traces",
        got=frame.name if frame.is_replica else "a trace (dj.jit, a merge function, jax.jit, ...)",
        why="a traced function runs once, and its values exist only when its program has run",
        fix=f"for x in dataset: strategy.run(step, args=(x,)); checkpointer.{method}(...) "
        "between steps",
        error=ContextError,
    )


# -- objects that are searched for state, though JAX treats them as leaves ---------------


def _is_nnx(value: object) -> bool:
    """Returns whether `value` is a Flax NNX object or the state of one."""
    nnx = sys.modules.get("flax.nnx")  # if not imported, nothing can be one
    return nnx is not None and isinstance(value, (nnx.Pytree, nnx.State))


def _keeps_variables(value: object) -> bool:
    """Returns whether `value` declares the variables it keeps."""
    return callable(getattr(type(value), "kept_variables", None))


def _is_node(value: object) -> bool:
    """Returns whether distjax handles `value` itself, rather than JAX flattening it."""
    return (
        isinstance(value, Variable)
        or is_per_replica(value)
        or _is_nnx(value)
        or keeps_own_state(value)
        or _keeps_variables(value)
    )


def _inside_of(value: PyTree) -> list[tuple[str, Any]] | None:
    """Returns the state that `value` keeps, with paths; None if there is none to find.

    These are the variables, NNX objects and iterators in ``value.kept_variables()``,
    or else among its attributes, recursively, each once. Arrays and numbers there
    are left out, since they could not be restored in place.
    """
    if _keeps_variables(value):
        return list(_find_objects("", value.kept_variables(), set()))
    if _is_node(value):
        return None
    return list(_find_objects("", value, set())) or None


def _find_objects(name: str, value: PyTree, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if _is_node(value) and not is_per_replica(value):
        yield name, value
        return
    for key, child in _children(value):
        yield from _find_objects(f"{name}/{key}" if name else key, child, seen)


def _children(value: PyTree) -> list[tuple[str, Any]]:
    as_dict = getattr(type(value), "_asdict", None)
    if as_dict is not None:  # a namedtuple, e.g. an optax state
        value = as_dict(value)
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return [(str(i), child) for i, child in enumerate(value)]
    if isinstance(value, _CLOSED):
        return []
    return attributes_of(value)
