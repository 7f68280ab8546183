"""What Python objects refer to: searched for stateful objects, for arrays, and for variables.

References are found in closure cells, in globals that a function's code names, in default
arguments, in `functools.partial`, in the object of a bound method, in containers and the user's
objects in any of these, and in the user's functions that they refer to. Nothing is modified, and no
code of the user runs: an attribute is read as it is stored.
"""

from __future__ import annotations

import argparse
import collections.abc
import contextlib
import dis
import functools
import keyword
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import jax

from distjax._src import user_lines
from distjax._src.placement import PerReplica
from distjax._src.replica.arguments import Static
from distjax._src.typing import PyTree
from distjax.errors import message

#: Packages whose functions and objects are not searched, since they hold no objects of the user.
_LIBRARIES = sys.stdlib_module_names - {"__main__"} | frozenset(
    "jax jaxlib flax optax numpy orbax chex distjax tensorflow torch grain".split()
)
#: Longer containers hold data rather than modules, and would be slow to search at each call.
MAX_ITEMS = 1000
#: How many levels of attributes of user objects are followed.
MAX_DEPTH = 3
_READS_OF_GLOBALS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


#: Containers with more items hold data, also where a trace is searched for variables.
_MAX_ITEMS = 10_000
#: Whose parts are more is data rather than state, and would be slow to search.
_MAX_PARTS = 5000
#: Types that refer to nothing; exact, since instances of subclasses may have attributes.
ATOMS = frozenset({int, float, bool, str, bytes, complex, types.CodeType, types.BuiltinMethodType})
CONTAINERS = (dict, types.MappingProxyType, list, tuple, collections.deque)
#: Classes of libraries that hold what the user puts into them: their attributes are followed.
HOLDERS = (
    types.SimpleNamespace,
    argparse.Namespace,
    collections.abc.Mapping,  # ChainMap, UserDict, FrozenDict, configurations
    collections.UserList,
)
#: Packages of distjax whose objects have variables.
_WITH_VARIABLES = frozenset({"metrics", "layers", "optim", "losses"})
#: What refers to others by itself, not by attributes of an object.
_WITHOUT_ATTRIBUTES = (
    *CONTAINERS,
    types.CellType,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    Static,
)
_WITHOUT_STATE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_OF_PARTIALS = ("func", "args", "keywords")

#: Where something was found. A program that was compiled for objects of equal structure at the same
#: places, and no others, may run with these. A path: (the path of what refers to a value, how it
#: does so); for a root, its number.
Place = Hashable


def parts_of(value: PyTree, max_items: int = _MAX_ITEMS) -> Iterator[tuple[str, Any, Any]]:
    """Yields what `value` refers to: (kind of reference, key, part); runs no code of the user.

    The kinds are those of `reached.ROADS`. Longer containers hold data, and are not looked into.
    """
    if isinstance(value, CONTAINERS):
        if len(value) <= max_items:
            yield from items_of(value)
    elif isinstance(value, types.CellType):
        yield from contents_of(value)
    elif isinstance(value, types.MethodType):
        yield "attribute", "__func__", value.__func__
        yield "attribute", "__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("attribute", name, getattr(value, name)) for name in _OF_PARTIALS)
    elif isinstance(value, Static):
        yield "attribute", "value", value.value
    elif isinstance(value, types.FunctionType) and not is_of_a_library(value):
        yield from _parts_of_function(value)
    elif is_users_object(value):
        yield from stored_attributes(value)
    elif not isinstance(value, (types.ModuleType, type)):
        wrapped = getattr(value, "__wrapped__", None)
        if wrapped is not None:
            yield "attribute", "__wrapped__", wrapped


def _parts_of_function(fn: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
    if fn.__closure__:
        yield "attribute", "__closure__", fn.__closure__
    named = names_of_globals(fn.__code__) if names_users_objects(fn) else ()
    yield from (("global", n, fn.__globals__[n]) for n in named if n in fn.__globals__)
    for name in ("__defaults__", "__kwdefaults__"):
        if (part := getattr(fn, name)) is not None:
            yield "attribute", name, part
    for name, part in vars(fn).items():
        yield "attribute", name, part


def is_users_object(value: PyTree) -> bool:
    """Returns whether a value is an object with attributes of the user's."""
    if isinstance(value, (types.ModuleType, type, *_WITHOUT_ATTRIBUTES)):
        return False
    return isinstance(value, HOLDERS) or not is_of_a_library(value)


def _search(
    roots: Iterable[tuple[Any, Any]],
    is_found: Callable[[Any], bool],
    enters: Callable[[Any], bool],
    extend: Callable[[Any, str, Any], Any],
) -> list[tuple[Any, Any]]:
    """Returns what is found below `roots`, and where, breadth first: `MAX_DEPTH` attributes deep.

    What is found is not entered itself. ``extend(place, kind, key)`` returns the place of a part.
    """
    found: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    # What is near is found before the limit of depth cuts a longer path.
    queue = collections.deque((value, place, 0) for value, place in roots)
    while queue:
        value, place, depth = queue.popleft()
        if is_found(value):
            found.append((value, place))
        elif id(value) not in seen and len(queue) < _MAX_PARTS and enters(value):
            seen.add(id(value))
            is_deeper = not isinstance(value, _WITHOUT_ATTRIBUTES)
            for kind, key, part in parts_of(value, MAX_ITEMS):
                below = depth + (is_deeper and key != "__wrapped__")
                if part is not None and below <= MAX_DEPTH:
                    queue.append((part, extend(place, kind, key), below))
    return found


def find_captures(roots: list[Any], is_stateful: Callable[[Any], bool]) -> list[tuple[Any, Place]]:
    """Returns the stateful objects that `roots` refer to and their places, one per reference."""
    return _search(
        ((root, number) for number, root in enumerate(roots)), is_stateful, _may_refer, _step_below
    )


def _may_refer(value: object) -> bool:
    return type(value) not in ATOMS and not isinstance(value, (jax.Array, PerReplica, type))


def _step_below(place: Place, kind: str, key: PyTree) -> Place:
    # A key that is an object would live as long as the program.
    return place, key if isinstance(key, (str, int)) else hash(key)


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


def names_users_objects(code: types.FunctionType | types.ModuleType | type) -> bool:
    """Returns whether what a function, module or class names is followed: a user's, as it seems.

    To follow that of all packages that are installed would take seconds: a step with an `assert`
    names pytest. The user's own may be installed, too, and imports distjax somewhere.
    """
    name: Any = code.__module__ if isinstance(code, types.FunctionType) else module_of(code)
    if not isinstance(name, str):
        return True  # made by `exec` with globals of one's own
    package = name.partition(".")[0]
    return not (is_library(package) or _is_installed_without_distjax(package))


@functools.lru_cache(maxsize=4096)
def _is_installed_without_distjax(package: str) -> bool:
    module = sys.modules.get(package)
    path = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
    if not path.startswith(user_lines.INSTALLED):
        return False
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    own = (m for name, m in modules if f"{name}.".startswith(f"{package}."))
    return not any(_names_distjax(m) for m in own if isinstance(m, types.ModuleType))


def _names_distjax(module: types.ModuleType) -> bool:
    """Returns whether a module has imported anything from distjax."""
    kinds = (types.ModuleType, types.FunctionType, type)
    members = (value for value in list(vars(module).values()) if issubclass(type(value), kinds))
    return any(module_of(value).partition(".")[0] == "distjax" for value in members)


def find_arrays(
    value: object,
    name: str,
    kinds: tuple[type, ...] = (jax.Array,),
    is_stateful: Callable[[object], bool] = lambda value: False,
) -> dict[str, Any]:
    """Returns the arrays that an object holds, by their names: "state.w"; and stateful objects.

    The first ones, breadth first, of an object that has very many parts.
    """
    is_found = lambda value: isinstance(value, kinds) or is_stateful(value)
    return {name: part for part, name in _search([(value, name)], is_found, _holds, _name_below)}


def _holds(value: object) -> bool:
    """Returns whether a value holds others as its state: a function refers to them only."""
    if isinstance(value, (tuple, list, dict, types.MethodType, types.SimpleNamespace)):
        return True
    return not isinstance(value, _WITHOUT_STATE) and not is_of_a_library(value)


def _name_below(name: str, kind: str, key: PyTree) -> str:
    if kind in ("item", "dict item"):
        return f"{name}[{key!r}]"
    return f"{name}.{key}"


def attributes_of(value: object) -> list[tuple[str, Any]]:
    """Returns an object's attributes by name, also those in `__slots__`; runs none of its code."""
    found = list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        for name, member in vars(cls).items() if "__slots__" in vars(cls) else ():
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    found.append((name, member.__get__(value)))
    return found


def leak_text(function: str, path: str, tracer: jax.Array, *, is_in_object: bool = False) -> str:
    """Returns the error text for a traced value that a function has left at `path`.

    If it `is_in_object`, that is the path of an object of a bridge which was not there before.
    """
    fix = (
        f"pass the value and return the new one, or make it a variable: {path} = dj.Variable(...), "
        f"and {path}.assign(...) in the step"
    )
    if is_in_object:
        fix = (
            "create the object before the step, and update the one that is there: "
            f"nnx.update({path}, state)"
        )
    return message(
        f"{function} needs to return what it computes, or to assign it to variables",
        got=f"a traced value of type {jax.typeof(tracer).str_short()} in {path}",
        why="the Python code of a compiled step does not run again, so nothing "
        "would be written at later calls, and a traced value is useless "
        "outside of its trace",
        fix=fix,
    )


# -- kinds of references -------------------------------------------------------


def reference_to(value: PyTree) -> Callable[[], Any]:
    """Returns a weak reference to a value; a strong one if it takes none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def items_of(value: PyTree) -> Iterator[tuple[str, Any, Any]]:
    """Yields what a container holds: (kind, key, item)."""
    if isinstance(value, (dict, types.MappingProxyType)):
        kind = "item" if type(value) in _EXACT else "dict item"
        yield from ((kind, key, item) for key, item in list(value.items()))
    else:
        yield from (("item", i, x) for i, x in enumerate(value))


_EXACT = (dict, collections.OrderedDict, types.MappingProxyType)


def contents_of(cell: types.CellType) -> Iterator[tuple[str, Any, Any]]:
    """Yields what a cell holds, if anything."""
    try:
        yield "attribute", "cell_contents", cell.cell_contents
    except ValueError:  # empty
        return


def stored_attributes(value: PyTree) -> Iterator[tuple[str, str, Any]]:
    """Yields an object's attributes; those that a read would not give as they are by another road.

    A property would run the user's code at each call.
    """
    cls = type(value)
    is_plain = cls.__getattribute__ is object.__getattribute__
    for name, part in attributes_of(value):
        found = getattr(cls, name, None)
        is_slot = isinstance(found, types.MemberDescriptorType)
        is_read = is_plain and name.isidentifier() and not keyword.iskeyword(name)
        if is_read and (is_slot or not hasattr(type(found), "__set__")):
            yield "attribute", name, part
        elif not is_slot:
            yield "instance", name, part


def functions_in(value: PyTree) -> Iterator[Any]:
    """Yields the functions of a member of a class."""
    if isinstance(value, property):
        yield from (f for f in (value.fget, value.fset) if f is not None)
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, functools.cached_property):
        yield value.func
    elif isinstance(value, functools.partialmethod):
        yield value.func
    elif isinstance(value, types.FunctionType):
        yield value


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names of attributes that `code` and the code in it use."""
    nested = [names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*nested)


def module_of(value: PyTree) -> str:
    """Returns the name of a module, or of that of a class."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return name if isinstance(name, str) else "builtins"


def has_variables(value: PyTree) -> bool:
    """Returns whether a value is an object of distjax that has variables."""
    package, *inside = module_of(type(value)).split(".")
    return package == "distjax" and not _WITH_VARIABLES.isdisjoint(inside[:2])
