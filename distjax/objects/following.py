"""A Python function that follows references, and compares what is there with what was.

Generated, since it runs before each call: following one reference takes some ten nanoseconds.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from distjax.objects.captures import is_of_a_library
from distjax.objects.references import CONTAINERS, module_of, reference_to
from distjax.typing import PyTree
from distjax.variables.stored_variable import StoredVariable

#: Packages of distjax whose objects have variables.
_WITH_VARIABLES = frozenset({"metrics", "layers", "optim", "losses"})
#: What is made anew at each access, or is compared otherwise.
_WITHOUT_IDENTITY = (types.MethodType, types.CellType, functools.partial, *CONTAINERS)


def _instance_dict(value: PyTree) -> Any:
    return object.__getattribute__(value, "__dict__")


def _element(value: PyTree, element: PyTree) -> Any:
    """Returns an element of a set; raises a KeyError if it has no such."""
    if element in value:
        return element
    raise KeyError(element)


HELPERS: dict[str, Any] = {
    "attributes": _instance_dict,
    "dict_get": dict.get,
    "element": _element,
}

#: How a kind of reference is followed: as code, and here. {0}: the holder, {1}: the key.
ROADS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "attribute": ("{0}.{1}", getattr),
    "global": ("{0}[{1}]", lambda h, k: h.__globals__[k]),
    "instance": ("attributes({0})[{1}]", lambda h, k: _instance_dict(h)[k]),
    "item": ("{0}[{1}]", lambda h, k: h[k]),
    "dict item": ("dict_get({0}, {1})", dict.get),
    "object item": ("{0}[{1}()]", lambda h, k: h[k()]),
    "element": ("element({0}, {1}())", lambda h, k: _element(h, k())),
    "call": ("{0}()", lambda h, _: h()),
    "context": ("{0}.get(None)", lambda h, _: h.get(None)),
    "member": ("vars({0})[{1}]", lambda h, k: vars(h)[k]),
}


class Edge(NamedTuple):
    """One reference: the holder and the value, by their numbers, and how one gets there."""

    holder: int
    kind: str
    key: PyTree
    value: int


class Comparison:
    """The Python function that follows references and compares.

    Args:
      values: all objects that were found.
      roots: weak references to those that are not followed to.
      targets: the numbers of those to be compared.
      edges: the references that lead to them.
      vacant: references to None, to be compared.
    """

    def __init__(
        self,
        values: Sequence[Any],
        roots: dict[int, Callable[[], Any]],
        targets: set[int],
        edges: Sequence[Edge],
        vacant: Sequence[tuple[int, str, Any]],
    ):
        self._values, self._roots = values, roots
        self._targets, self._vacant = targets, vacant
        self._from: dict[int, list[Edge]] = collections.defaultdict(list)
        for edge in edges:
            self._from[edge.holder].append(edge)
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {}
        self._named: dict[int, str] = {}  # the constants, by id
        self._bound: set[int] = set()
        self._bound_globals: set[str] = set()

    def compile(self) -> Callable[[], bool] | None:
        """Returns the function; None if it would compare nothing."""
        compared = {holder for holder, _, _ in self._vacant}
        queue = collections.deque(
            n for n in sorted(self._roots) if n in self._from or n in compared
        )
        for number in queue:
            self._lines.append(f"n{number} = {self._constant(self._roots[number])}()")
            self._bound.add(number)
        num_roots = len(queue)
        while queue:
            number = queue.popleft()
            for edge in self._from[number]:
                queue.extend(self._follow(edge))
            for holder, kind, key in self._vacant:
                if holder == number:
                    self._require(f"{self._road(holder, kind, key)} is not None")
        if len(self._lines) == num_roots:
            return None
        return _make_function(tuple(self._lines), self._constants)

    def _follow(self, edge: Edge) -> Iterator[int]:
        """Adds the lines of one reference; yields its value if it is to be followed further."""
        number, road = edge.value, self._road(edge.holder, edge.kind, edge.key)
        value = self._values[number]
        if number in self._targets:
            is_variable = isinstance(value, StoredVariable)
            wanted = self._constant(value if is_variable else weakref.ref(value))
            self._require(f"{road} is not {wanted}{'' if is_variable else '()'}")
        elif number in self._bound:
            self._require(f"{road} is not n{number}")
        else:
            self._bound.add(number)
            self._lines.append(f"n{number} = {road}")
            self._compare_on_the_way(edge, number, value)
            yield number

    def _compare_on_the_way(self, edge: Edge, number: int, value: PyTree) -> None:
        if isinstance(value, CONTAINERS):
            if not (edge.key == "__closure__" or has_variables(self._values[edge.holder])):
                self._require(f"len(n{number}) != {len(value)}")
        elif isinstance(value, types.FunctionType):
            self._require(f"n{number}.__code__ is not {self._constant(value.__code__)}")
        elif not is_of_a_library(value) and not isinstance(value, _WITHOUT_IDENTITY):
            reference = reference_to(value)
            if isinstance(reference, weakref.ref):
                self._require(f"n{number} is not {self._constant(reference)}()")

    def _require(self, unlike: str) -> None:
        self._lines.append(f"if {unlike}: return False")

    def _road(self, holder: int, kind: str, key: PyTree) -> str:
        name = f"n{holder}"
        if kind == "global":
            name = f"g{holder}"
            if name not in self._bound_globals:
                self._bound_globals.add(name)
                self._lines.append(f"{name} = n{holder}.__globals__")
        if kind != "attribute":
            key = repr(key) if type(key) in (str, int) else self._constant(key)
        return ROADS[kind][0].format(name, key)

    def _constant(self, value: PyTree) -> str:
        name = self._named.get(id(value))
        if name is None:
            name = self._named[id(value)] = f"c{len(self._constants)}"
            self._constants[name] = value
        return name


def _make_function(lines: tuple[str, ...], constants: dict[str, Any]) -> Callable[[], bool]:
    space = {**HELPERS, **constants}
    exec(_code_for(lines, tuple(constants)), space)
    return space["is_current"]


@functools.lru_cache(maxsize=256)
def _code_for(lines: tuple[str, ...], constants: tuple[str, ...]) -> types.CodeType:
    # Defaults are local, which is the fastest to read.
    text = [
        f"def is_current({', '.join(f'{name}={name}' for name in constants)}):",
        " try:",
        *(f"  {line}" for line in lines),
        " except Exception:",  # something is not there: the function itself will say so
        "  return False",
        " return True",
    ]
    return compile("\n".join(text), "<what a step reached>", "exec")


def is_compared_whole(value: PyTree) -> bool:
    """Returns whether an object of distjax is compared by identity, not by what is in it."""
    cls = type(value)
    extended = getattr(cls, "extended", None)
    is_strategy = isinstance(extended, property) and extended.fget.__module__.startswith("distjax.")
    return is_strategy or getattr(cls, "is_compared_whole", False)


def has_variables(value: PyTree) -> bool:
    """Returns whether a value is an object of distjax that has variables."""
    package, _, rest = module_of(type(value)).partition(".")
    return package == "distjax" and rest.partition(".")[0] in _WITH_VARIABLES
