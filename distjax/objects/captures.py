"""Finds the stateful objects that a function uses but does not take as arguments.

References are found in closure cells, in globals that the function's code names, in
default arguments, in `functools.partial`, in the object of a bound method, in lists and
dicts in any of these, and in the user's functions that it refers to. Nothing is modified;
whatever is found is traced as it is.

With each object goes the place where it was found: a program that was compiled for objects of
equal structure at the same places, and no others, may run with these.
"""

from __future__ import annotations

import collections
import dis
import functools
import sys
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from distjax.placement.per_replica import PerReplica

#: Packages whose functions and objects are not searched, since they hold no objects of the user.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | frozenset(
    "jax jaxlib flax optax numpy orbax chex distjax tensorflow torch grain".split()
)
#: Longer containers hold data rather than modules, and would be slow to search at each call.
MAX_ITEMS = 1000
#: How many levels of attributes of user objects are followed.
MAX_DEPTH = 3
_READS_OF_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
#: Types that refer to nothing; exact, since instances of subclasses may have attributes.
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), type, types.ModuleType})


#: A path: (the path of what refers to a value, how it does so); for a root, its number.
Place = Hashable


def find_captures(roots: list[Any], is_stateful: Callable[[Any], bool]) -> list[tuple[Any, Place]]:
    """Returns the stateful objects that `roots` refer to and their places, one per reference.

    Args:
      roots: functions, and user objects among their arguments.
      is_stateful: returns whether an object is stateful.
    """
    found: list[tuple[Any, Place]] = []
    seen: set[int] = set()
    # Breadth first, so that what is near is found before the limit of depth cuts a longer path.
    queue: collections.deque[tuple[Any, Place, int]] = collections.deque(
        (root, number, 0) for number, root in enumerate(roots) if type(root) not in _ATOMS
    )
    while queue:
        value, place, depth = queue.popleft()
        if is_stateful(value):
            found.append((value, place))
        elif id(value) not in seen and not isinstance(value, (jax.Array, PerReplica, type)):
            seen.add(id(value))
            for step, part, below in _references(value, depth):
                if type(part) not in _ATOMS:
                    queue.append((part, (place, step), below))
    return found


def _references(value: object, depth: int) -> Iterator[tuple[Hashable, Any, int]]:
    """Yields what `value` refers to, each with how it does so and its depth."""
    if isinstance(value, dict):
        if len(value) <= MAX_ITEMS:
            for key, item in value.items():
                # A key that is an object would live as long as the program.
                yield key if isinstance(key, (str, int)) else hash(key), item, depth
    elif isinstance(value, (tuple, list)):
        if len(value) <= MAX_ITEMS:
            for number, item in enumerate(value):
                yield number, item, depth
    elif isinstance(value, functools.partial):
        yield "func", value.func, depth
        yield "args", value.args, depth
        yield "keywords", value.keywords, depth
    elif isinstance(value, types.MethodType):
        yield "__func__", value.__func__, depth
        yield "__self__", value.__self__, depth
    elif is_of_a_library(value):
        yield "__wrapped__", getattr(value, "__wrapped__", None), depth
    else:
        if isinstance(value, types.FunctionType):
            for step, part in _parts_of_function(value):
                yield step, part, depth
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and depth < MAX_DEPTH:
            for name, attribute in list(attributes.items()):
                yield name, attribute, depth + 1


def _parts_of_function(fn: types.FunctionType) -> Iterator[tuple[Hashable, Any]]:
    for number, cell in enumerate(fn.__closure__ or ()):
        try:
            yield number, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for name in names_of_globals(fn.__code__):
        yield name, fn.__globals__.get(name)
    yield "__defaults__", fn.__defaults__
    yield "__kwdefaults__", fn.__kwdefaults__


@functools.lru_cache(maxsize=4096)
def names_of_globals(code: types.CodeType) -> tuple[str, ...]:
    """Returns the globals that `code` and nested code read; `co_names` would add attributes."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname in _READS_OF_GLOBALS}
    nested = [names_of_globals(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return tuple(sorted(own.union(*nested)))


def is_of_a_library(value: object) -> bool:
    """Returns whether a function or an object belongs to a library that is not searched."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str):
        if isinstance(value, types.FunctionType):  # made by `exec` with globals of one's own
            return False
        module = type(value).__module__
    own = getattr(value, "__dict__", None)
    is_instance = not isinstance(value, types.FunctionType) and own is not None
    modules = {module, type(value).__module__} if is_instance else {module}
    return any(map(is_library, modules))


def is_library(module: str) -> bool:
    """Returns whether a module, by its name, is of a library that is not searched."""
    return module.partition(".")[0] in _LIBRARIES
