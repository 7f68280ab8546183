"""Objects that a checkpoint searches for state, though JAX treats them as leaves."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from distjax.data.dataset import DistributedDataset
from distjax.objects.held_arrays import attributes_of
from distjax.placement.per_replica import is_per_replica
from distjax.strategies.default import DefaultExtended
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.strategy import Strategy
from distjax.typing import PyTree
from distjax.variables.variable import Variable

#: Objects whose attributes are not part of a user's state.
_CLOSED = (
    *(type, types.FunctionType, types.MethodType, types.ModuleType),
    *(Strategy, StrategyExtended, DefaultExtended),
    DistributedDataset,  # its iterator has the position; the user's dataset may be read ahead
)


def is_nnx(value: object) -> bool:
    """Returns whether `value` is a Flax NNX object or the state of one."""
    nnx = sys.modules.get("flax.nnx")  # if not imported, nothing can be one
    return nnx is not None and isinstance(value, (nnx.Pytree, nnx.State))


def keeps_own_state(value: object) -> bool:
    """Returns whether `value` has a state of its own, as data iterators do.

    Only its class is looked at, since reading an attribute of an arbitrary object may run code.
    """
    methods = (getattr(type(value), name, None) for name in ("get_state", "set_state"))
    return all(callable(method) for method in methods)


def keeps_variables(value: object) -> bool:
    """Returns whether `value` declares the variables it keeps."""
    return callable(getattr(type(value), "kept_variables", None))


def is_node(value: object) -> bool:
    """Returns whether distjax handles `value` itself, rather than JAX flattening it."""
    return (
        isinstance(value, Variable)
        or is_per_replica(value)
        or is_nnx(value)
        or keeps_own_state(value)
        or keeps_variables(value)
    )


def inside_of(value: PyTree) -> list[tuple[str, Any]] | None:
    """Returns the state that `value` keeps, with paths; None if there is none to find.

    These are the variables, NNX objects and iterators in ``value.kept_variables()``,
    or else among its attributes, recursively, each once. Arrays and numbers there
    are left out, since they could not be restored in place.
    """
    if keeps_variables(value):
        return list(_find_objects("", value.kept_variables(), set()))
    if is_node(value):
        return None
    return list(_find_objects("", value, set())) or None


def setting_of(value: object, name: str) -> str:
    """Returns the setting, as code, that the values at `name` inside of `value` depend on.

    An object with `kept_variables()` may have a method `kept_settings()` too: texts by the first
    part of the path. "" stands for none.
    """
    method = getattr(type(value), "kept_settings", None)
    return "" if method is None else method(value).get(name.partition("/")[0], "")


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
