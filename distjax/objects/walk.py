"""What Python objects refer to: searched for stateful objects, for arrays, and for variables."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import keyword
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax

from distjax.errors import message
from distjax.placement.per_replica import PerReplica
from distjax.typing import PyTree

# -- captures -----------------------------------------------------------------
# Finds the stateful objects that a function uses but does not take as arguments.
#
# References are found in closure cells, in globals that the function's code names, in
# default arguments, in `functools.partial`, in the object of a bound method, in lists and
# dicts in any of these, and in the user's functions that it refers to. Nothing is modified;
# whatever is found is traced as it is.
#
# With each object goes the place where it was found: a program that was compiled for objects of
# equal structure at the same places, and no others, may run with these.


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


# -- held arrays --------------------------------------------------------------
# The arrays that a Python object holds, by their names.


#: What holds more is data rather than state, and would be slow to search at each trace.
_MAX_PARTS = 5000
_WITHOUT_STATE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def find_arrays(
    value: object,
    name: str,
    kinds: tuple[type, ...] = (jax.Array,),
    is_stateful: Callable[[object], bool] = lambda value: False,
) -> dict[str, Any]:
    """Returns the arrays that an object holds, by their names: "state.w"; and stateful objects.

    The first ones, breadth first, of an object that has very many parts.

    Args:
      value: the object.
      name: its name.
      kinds: the types that count as arrays.
      is_stateful: whether a part of it is an object of a bridge, which counts as one array.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    queue = collections.deque([(name, value, 0)])
    while queue:
        name, value, depth = queue.popleft()
        if isinstance(value, kinds) or is_stateful(value):
            found[name] = value
        elif id(value) not in seen and len(queue) < _MAX_PARTS:
            seen.add(id(value))
            queue.extend((name + end, part, below) for end, part, below in _parts(value, depth))
    return found


def _parts(value: object, depth: int) -> Iterator[tuple[str, object, int]]:
    """Yields what `value` holds: the end of its name, the part, and its depth."""
    if isinstance(value, (tuple, list, dict)):
        if len(value) <= MAX_ITEMS:
            for key, item in list(value.items()) if isinstance(value, dict) else enumerate(value):
                yield f"[{key!r}]", item, depth
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__, depth
    elif depth < MAX_DEPTH and _has_state(value):
        for attribute, inner in attributes_of(value):
            yield f".{attribute}", inner, depth + 1


def _has_state(value: object) -> bool:
    """Returns whether a value is an object whose attributes may be the user's."""
    is_own = not isinstance(value, _WITHOUT_STATE) and not is_of_a_library(value)
    return is_own or isinstance(value, types.SimpleNamespace)


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

    Args:
      function: the function's name.
      path: where the value is; the object that holds it if `is_in_object`.
      tracer: the value.
      is_in_object: whether it is held by an object of a bridge that was not there before.
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
        why="a compiled step does not run its Python code again: nothing more would be written "
        "there, and a traced value is of no use outside of its trace",
        fix=fix,
    )


# -- references ---------------------------------------------------------------
# What Python objects refer to, and how code follows it: one kind of reference a line.
#
# No code of the user runs in a search: an attribute is read as it is stored.


#: Longer containers hold data.
_MAX_ITEMS = 10_000
#: Types that refer to nothing.
ATOMS = frozenset({int, float, bool, str, bytes, complex, types.CodeType, types.BuiltinMethodType})
CONTAINERS = (dict, list, tuple, collections.deque, set, frozenset)


def reference_to(value: PyTree) -> Callable[[], Any]:
    """Returns a weak reference to a value; a strong one if it takes none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def items_of(value: PyTree) -> Iterator[tuple[str, Any, Any]]:
    """Yields what a container holds: (kind, key, item)."""
    if len(value) > _MAX_ITEMS:
        return
    if isinstance(value, dict):
        for key, item in list(value.items()):
            if type(item) in ATOMS:
                continue
            if not _is_plain_key(key):
                yield "object item", reference_to(key), item
            else:
                yield "item" if type(value) in _EXACT else "dict item", key, item
        return
    kept = [(i, x) for i, x in enumerate(value) if type(x) not in ATOMS]
    if isinstance(value, (set, frozenset)):
        yield from (("element", reference_to(x), x) for _, x in kept)
    else:
        yield from (("item", i, x) for i, x in kept)


_EXACT = (dict, collections.OrderedDict)


def _is_plain_key(key: Hashable) -> bool:
    return isinstance(key, (str, int, float, bytes, type(None))) or (
        isinstance(key, tuple) and all(map(_is_plain_key, key))
    )


def contents_of(cell: types.CellType) -> Iterator[tuple[str, Any, Any]]:
    """Yields what a cell holds, if anything."""
    try:
        yield "attribute", "cell_contents", cell.cell_contents
    except ValueError:  # empty
        return


#: `__getattribute__` of classes whose attributes are read as they are stored.
_GET_WHAT_IS_STORED = (object.__getattribute__, threading.local.__getattribute__)


def stored_attributes(value: PyTree) -> Iterator[tuple[str, str, Any]]:
    """Yields an object's attributes; those that a read would not give as they are by another road.

    A property would run the user's code at each call.
    """
    cls = type(value)
    is_plain = cls.__getattribute__ in _GET_WHAT_IS_STORED
    for name, part in attributes_of(value):
        if type(part) in ATOMS:
            continue
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


@functools.lru_cache(maxsize=4096)
def names_in_texts(code: types.CodeType) -> frozenset[str]:
    """Returns the names that stand in texts in `code` and the code in it."""
    nested = [names_in_texts(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    own = {x for x in code.co_consts if isinstance(x, str) and x.isidentifier()}
    return frozenset(own).union(*nested)


def module_of(value: PyTree) -> str:
    """Returns the name of a module, or of that of a class."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return name if isinstance(name, str) else "builtins"
