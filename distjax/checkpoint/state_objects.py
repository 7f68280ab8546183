"""Objects that a checkpoint looks into, though JAX takes them for leaves."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from distjax.placement.per_replica import is_per_replica
from distjax.strategies.default import DefaultExtended
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.strategy import Strategy
from distjax.typing import PyTree
from distjax.variables.variable import Variable

#: Objects whose attributes are no part of a user's state.
_CLOSED = (
    *(type, types.FunctionType, types.MethodType, types.ModuleType),
    *(Strategy, StrategyExtended, DefaultExtended),
)


def is_nnx(value: object) -> bool:
    """Returns whether `value` is a Flax NNX object or a state of one."""
    nnx = sys.modules.get("flax.nnx")  # not imported yet: nothing can be of it
    return nnx is not None and isinstance(value, (nnx.Pytree, nnx.State))


def is_stateful(value: object) -> bool:
    """Returns whether `value` has a state of its own, as an iterator over data has."""
    methods = (getattr(type(value), name, None) for name in ("get_state", "set_state"))
    return all(callable(method) for method in methods)


def keeps_variables(value: object) -> bool:
    """Returns whether `value` says which variables it keeps."""
    return callable(getattr(type(value), "kept_variables", None))


def is_node(value: object) -> bool:
    """Returns whether `value` is looked at by distjax rather than flattened by JAX."""
    return (
        isinstance(value, Variable)
        or is_per_replica(value)
        or is_nnx(value)
        or is_stateful(value)
        or keeps_variables(value)
    )


def inside_of(value: PyTree) -> dict[str, Any] | None:
    """Returns by path what `value` keeps; None: it is no object to look into.

    That is the variables, NNX objects and iterators in ``value.kept_variables()``,
    or else among its attributes and theirs, each once. Arrays and numbers there
    could not be restored in place, so they are no part of it.
    """
    if keeps_variables(value):
        return dict(_find_objects("", value.kept_variables(), set()))
    if is_node(value):
        return None
    return dict(_find_objects("", value, set())) or None


def _find_objects(name: str, value: PyTree, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if is_node(value) and not is_per_replica(value):
        yield name, value
        return
    for key, child in _children(value):
        yield from _find_objects(f"{name}/{key}" if name else key, child, seen)


def _children(value: PyTree) -> list[tuple[str, Any]]:
    if hasattr(value, "_asdict"):  # a namedtuple, as optax states are
        value = value._asdict()
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(i), child) for i, child in enumerate(value)]
    if isinstance(value, _CLOSED):
        return []
    return list(getattr(value, "__dict__", {}).items())
