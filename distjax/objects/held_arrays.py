"""The arrays that a Python object holds, by their names."""

from __future__ import annotations

import collections
import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax

from distjax.errors import message
from distjax.objects.captures import MAX_DEPTH, MAX_ITEMS, is_of_a_library

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
