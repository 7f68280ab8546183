"""Objects with state that a function refers to without taking them as arguments.

A reference is found in closure cells, in globals that the function's code names,
in default arguments, in `functools.partial`, in the object of a bound method, in
lists and dicts in any of these, and in the user's functions that it refers to. For
the time of a trace these places hold traced objects.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from distjax.placement.per_replica import PerReplica

#: Packages whose functions and objects are not searched: they hold none of the user's.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | frozenset(
    "jax jaxlib flax optax numpy orbax chex distjax tensorflow torch grain".split()
)
#: Longer containers hold data, not modules, and a search of them would cost at each call.
_MAX_ITEMS = 1000
#: How deep attributes of the user's own objects are followed.
_MAX_DEPTH = 3


class Captures:
    """The objects with state that a function and its arguments' attributes refer to.

    Args:
      fn: the function, or any callable.
      is_stateful: tells the objects that are looked for.

    Attributes:
      objects: what was found, in the order of finding, each once.
    """

    def __init__(self, fn: Any, is_stateful: Callable[[Any], bool]):
        self._is_stateful = is_stateful
        self._seen: set[int] = set()
        self._depth = 0
        self._places: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
        self._found: dict[int, Any] = {}
        self.search(fn)

    @property
    def objects(self) -> list[Any]:
        """The objects found, each once, in the order of finding."""
        return list(self._found.values())

    def search(self, value: Any) -> bool:
        """Searches `value`; returns whether it is or directly contains an object."""
        if self._is_stateful(value):
            self._found.setdefault(id(value), value)
            return True
        if isinstance(value, (jax.Array, PerReplica, type, types.ModuleType, str, bytes)):
            return False
        if isinstance(value, (tuple, list, dict)):
            items = value.values() if isinstance(value, dict) else value
            return len(value) <= _MAX_ITEMS and self._search_all(items)
        if isinstance(value, functools.partial):
            return self._search_all(_parts(value))
        if isinstance(value, types.MethodType):
            self.search(value.__func__)
            return self.search(value.__self__)
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._search_inside(value)
        return False

    def _search_all(self, values: Iterable[Any]) -> bool:
        return True in [self.search(v) for v in values]

    def _search_inside(self, value: Any) -> None:
        """Searches what can be written to in place: cells, globals, attributes."""
        if _is_of_a_library(value):
            self.search(getattr(value, "__wrapped__", None))
            return
        if isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._search_place(cell, "cell_contents")
            for name in _names(value.__code__):
                if name in value.__globals__:
                    self._search_item(value.__globals__, name)
            self._search_place(value, "__defaults__")
            self._search_place(value, "__kwdefaults__")
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or self._depth == _MAX_DEPTH:
            return
        self._depth += 1
        for name in list(attributes):
            self._search_item(attributes, name)
        self._depth -= 1

    def _search_place(self, holder: Any, name: str) -> None:
        with contextlib.suppress(ValueError):  # an empty cell
            if self.search(getattr(holder, name)):
                write = functools.partial(setattr, holder, name)
                self._places.append((lambda: getattr(holder, name), write))

    def _search_item(self, holder: Any, name: str) -> None:
        if self.search(holder[name]):
            write = functools.partial(holder.__setitem__, name)
            self._places.append((lambda: holder[name], write))

    @contextlib.contextmanager
    def replace(self, replacements: Mapping[int, Any]) -> Iterator[None]:
        """Puts replacements, by the objects' id, in every place found, for a block."""
        before = [(write, read()) for read, write in self._places]
        try:
            for write, value in before:
                write(substitute(value, replacements))
            yield
        finally:
            for write, value in before:
                write(value)


def substitute(value: Any, replacements: Mapping[int, Any]) -> Any:
    """Returns `value` with objects exchanged, in containers, partials and methods too."""
    if id(value) in replacements:
        return replacements[id(value)]
    if isinstance(value, dict) and type(value) is dict:
        return {k: substitute(v, replacements) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(substitute(v, replacements) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(substitute(v, replacements) for v in value))
    if isinstance(value, functools.partial):
        args = (substitute(v, replacements) for v in value.args)
        keywords = {k: substitute(v, replacements) for k, v in value.keywords.items()}
        return functools.partial(substitute(value.func, replacements), *args, **keywords)
    if isinstance(value, types.MethodType) and id(value.__self__) in replacements:
        return types.MethodType(value.__func__, replacements[id(value.__self__)])
    return value


def _parts(partial: functools.partial[Any]) -> tuple[Any, ...]:
    return (partial.func, *partial.args, *partial.keywords.values())


def _names(code: types.CodeType) -> Iterator[str]:
    """Yields the names that `code`, and the code inside it, refers to."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_of_a_library(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        module = type(value).__module__
    own = getattr(value, "__dict__", None)
    is_instance = not isinstance(value, types.FunctionType) and own is not None
    modules = {module, type(value).__module__} if is_instance else {module}
    return any(m.partition(".")[0] in _LIBRARIES for m in modules)
