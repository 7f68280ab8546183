"""What Python objects refer to, and how code follows it: one kind of reference a line.

No code of the user runs in a search: an attribute is read as it is stored.
"""

from __future__ import annotations

import collections
import functools
import keyword
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from distjax.objects.held_arrays import attributes_of
from distjax.typing import PyTree

#: Longer containers hold data.
_MAX_ITEMS = 10_000
#: Types that refer to nothing.
ATOMS = frozenset({int, float, bool, str, bytes, complex, types.CodeType, types.BuiltinMethodType})
CONTAINERS = (dict, types.MappingProxyType, list, tuple, collections.deque, set, frozenset)


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
    if isinstance(value, (dict, types.MappingProxyType)):
        for key, item in list(value.items()):
            is_plain = _is_plain_key(key)
            if not is_plain and not isinstance(key, type):
                yield "element", reference_to(key), key
            if type(item) in ATOMS:
                continue
            if not is_plain:
                yield "object item", reference_to(key), item
            else:
                yield "item" if type(value) in _EXACT else "dict item", key, item
        return
    kept = [(i, x) for i, x in enumerate(value) if type(x) not in ATOMS]
    if isinstance(value, (set, frozenset)):
        yield from (("element", reference_to(x), x) for _, x in kept)
    else:
        yield from (("item", i, x) for i, x in kept)


_EXACT = (dict, collections.OrderedDict, types.MappingProxyType)


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
