"""What the traces of a program reached, and whether the function would reach the same now.

A compiled program uses the variables that its traces met. The user may put others in their place:
a new metric each epoch, an optimizer with another rate, an item of a list. So after a trace, the
references on the way from the function to what it touched are found, and compiled to one Python
function that follows them again and compares what is there, by identity, before each call:

    n0 = r0()                                      # the function, by weak reference
    n1 = n0.__globals__
    if n1["loss"].variables["total"] is not v0: return False

It holds strongly nothing but the variables that the program threads. References that lead to none
of them are not looked at, so that a call pays for what its step reaches.

What is compared: variables, strategies, and states of optimizers by identity; the user's objects
on the way, too, and the code of functions; the length of containers; and where the code names a
None or an empty container, that it still is one; of a container of modules, too, the length.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distjax._src.objects.stateful import active_bridge
from distjax._src.objects.walk import (
    ATOMS,
    CONTAINERS,
    HOLDERS,
    functions_in,
    has_variables,
    is_of_a_library,
    is_users_object,
    names_in,
    names_users_objects,
    parts_of,
    reference_to,
    stored_attributes,
)
from distjax._src.placement import PerReplica
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable

# -- following ----------------------------------------------------------------
# A Python function that follows references, and compares what is there with what was.
#
# Generated, since it runs before each call: following one reference takes some ten nanoseconds.


#: What is made anew at each access, or is compared otherwise.
_WITHOUT_IDENTITY = (types.MethodType, types.CellType, functools.partial, *CONTAINERS)


def _instance_dict(value: PyTree) -> Any:
    return object.__getattribute__(value, "__dict__")


HELPERS: dict[str, Any] = {
    "attributes": _instance_dict,
    "dict_get": dict.get,
}

#: How a kind of reference is followed: as code, and here. {0}: the holder, {1}: the key.
ROADS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "attribute": ("{0}.{1}", getattr),
    "global": ("{0}[{1}]", lambda h, k: h.__globals__[k]),
    "instance": ("attributes({0})[{1}]", lambda h, k: _instance_dict(h)[k]),
    "item": ("{0}[{1}]", lambda h, k: h[k]),
    "dict item": ("dict_get({0}, {1})", dict.get),
    "member": ("vars({0})[{1}]", lambda h, k: vars(h)[k]),
}


class Edge(NamedTuple):
    """One reference: the holder and the value, by their numbers, and how one gets there."""

    holder: int
    kind: str
    key: PyTree
    value: int


class Comparison:
    """The Python function that follows references, from roots to targets, and compares.

    `roots` are weak references; `targets` the numbers of the values to be compared, and `vacant`
    references to None, to be compared too.
    """

    def __init__(
        self,
        values: Sequence[Any],
        roots: dict[int, Callable[[], Any]],
        targets: set[int],
        edges: Sequence[Edge],
        vacant: Sequence[tuple[int, str, Any]],
    ):
        self._values, self._roots, self._targets = values, roots, targets
        self._vacant: dict[int, list[tuple[str, Any]]] = collections.defaultdict(list)
        for holder, kind, key in vacant:
            self._vacant[holder].append((kind, key))
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
        compared = self._from.keys() | self._vacant.keys()
        queue = collections.deque(n for n in sorted(self._roots) if n in compared)
        for number in queue:
            self._lines.append(f"n{number} = {self._constant(self._roots[number])}()")
            self._bound.add(number)
        num_roots = len(queue)
        while queue:
            number = queue.popleft()
            for edge in self._from.get(number, ()):
                queue.extend(self._follow(edge))
            for kind, key in self._vacant.get(number, ()):
                self._require(f"{self._road(number, kind, key)} is not None")
        if len(self._lines) == num_roots:
            return None
        return _make_function(tuple(self._lines), self._constants)

    def _follow(self, edge: Edge) -> Iterator[int]:
        """Adds the lines of one reference; yields its value if it is to be followed further."""
        number, road = edge.value, self._road(edge.holder, edge.kind, edge.key)
        value = self._values[number]
        if number in self._targets:
            is_variable = isinstance(value, Variable)
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


#: How many objects are searched.
_MAX_OBJECTS = 20_000
_ARRAYS = (jax.Array, np.ndarray, np.generic, PerReplica)


class Reached:
    """The references through which the traces of one program reached what they touched.

    `is_current` returns whether they lead to the same objects now; None: there are none.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forgets all traces."""
        self.is_current: Callable[[], bool] | None = None
        self._roots: dict[int, Callable[[], Any]] = {}
        self._touched: dict[Any, None] = {}

    def is_the_same(self) -> bool:
        """Returns whether the references lead to the same objects now."""
        return self.is_current is None or self.is_current()

    def record(self, roots: Iterable[Any], touched: Iterable[Any]) -> None:
        """Records one more trace: its function and Python objects, and the variables it touched."""
        for root in roots:
            parts = (
                (root.__func__, root.__self__) if isinstance(root, types.MethodType) else (root,)
            )
            self._roots.update((id(part), reference_to(part)) for part in parts)
        self._touched.update(dict.fromkeys(touched))
        self.is_current = _Search(list(self._roots.values()), self._touched).compile()


class _Search:
    """Finds the references from roots, which are held weakly, to the variables touched."""

    def __init__(self, roots: Sequence[Callable[[], Any]], touched: Iterable[Any]):
        self._touched = set(map(id, touched))
        self._values: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._edges: list[Edge] = []
        self._vacant: list[tuple[int, str, Any]] = []  # references to None
        self._roots: dict[int, Callable[[], Any]] = {}
        self._names: set[str] = set()
        self._globals: set[tuple[int, str]] = set()
        self._by_name: list[tuple[int, set[str]]] = []  # modules and classes, and names seen there
        self._queue: collections.deque[int] = collections.deque()
        for root in roots:
            if (value := root()) is not None:
                self._add_root(value, root)
        self._given = set(self._roots)
        self._run()

    # -- searching ------------------------------------------------------------

    def _run(self) -> None:
        while True:
            while self._queue and len(self._values) < _MAX_OBJECTS:
                number = self._queue.popleft()
                for kind, key, part in self._parts(number, self._values[number]):
                    self._add(number, kind, key, part)
            if not self._follow_names() or len(self._values) >= _MAX_OBJECTS:
                return

    def _follow_names(self) -> bool:
        """Follows what the code names in modules and classes; returns whether that was any."""
        for name in self._names & sys.modules.keys():  # imported in the function
            module: Any = sys.modules[name]  # or what another put there
            if isinstance(module, types.ModuleType):
                self._add_root(module, weakref.ref(module))
        for number, seen in self._by_name:
            holder = self._values[number]
            members = vars(holder)
            for name in self._names.intersection(members).difference(seen):
                seen.add(name)
                self._add_member(number, holder, name, members[name])
        return bool(self._queue)

    def _add_member(self, number: int, holder: PyTree, name: str, value: PyTree) -> None:
        if isinstance(holder, types.ModuleType):
            self._add(number, "attribute", name, value)
            return
        for part in functions_in(value):
            self._add_root(part, reference_to(part))
        if not isinstance(value, (types.FunctionType, property, staticmethod, classmethod)):
            self._add(number, "member", name, value)

    def _add_root(self, value: PyTree, reference: Callable[[], Any]) -> None:
        if type(value) not in ATOMS and id(value) not in self._numbers:
            self._roots[self._number(value)] = reference

    def _number(self, value: PyTree) -> int:
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._values)
            self._values.append(value)
            self._queue.append(number)
        return number

    def _add(self, holder: int, kind: str, key: PyTree, part: PyTree) -> None:
        if part is None:
            self._vacant.append((holder, kind, key))
        elif isinstance(part, (types.ModuleType, type)):
            # Another module or class of the same name is as other code: not looked for.
            self._add_root(part, reference_to(part))
        elif type(part) not in ATOMS and not isinstance(part, _ARRAYS):
            self._edges.append(Edge(holder, kind, key, self._number(part)))

    def _parts(self, number: int, value: PyTree) -> Iterator[tuple[str, Any, Any]]:
        """Yields what `value` refers to, as far as a trace may go there: (kind, key, part)."""
        if isinstance(value, Variable) or is_compared_whole(value):
            return
        if isinstance(value, (types.ModuleType, type)):
            if names_users_objects(value):
                self._by_name.append((number, set()))
        elif has_variables(value):
            chosen = getattr(type(value), "reached_parts", None)
            yield from (x for x in stored_attributes(value) if chosen is None or x[1] in chosen)
        else:
            if isinstance(value, types.FunctionType) and names_users_objects(value):
                self._names.update(names_in(value.__code__))
            elif is_users_object(value):
                for cls in type(value).__mro__:
                    if names_users_objects(cls):
                        self._add_root(cls, weakref.ref(cls))
                self._names.add("__call__")
            for kind, key, part in parts_of(value):
                if kind == "global":
                    place = id(value.__globals__), key
                    if place in self._globals:
                        continue
                    self._globals.add(place)
                yield kind, key, part

    # -- what leads to a target -------------------------------------------------

    def compile(self) -> Callable[[], bool] | None:
        """Returns the function that compares; None if nothing is to be compared."""
        targets = {n for n, value in enumerate(self._values) if self._is_target(value)}
        vacant, empty = self._find_vacant()
        into: dict[int, list[Edge]] = collections.defaultdict(list)
        for edge in self._edges:
            if edge.value in self._given or edge.value not in self._roots:
                into[edge.value].append(edge)
        leading = {*targets, *empty, *(n for n, _, _ in vacant)}
        open_ = list(leading)
        while open_:
            for edge in into[open_.pop()]:
                if edge.holder not in leading:
                    leading.add(edge.holder)
                    open_.append(edge.holder)
        edges = [e for es in into.values() for e in es if e.value in leading and self._leads(e)]
        return Comparison(self._values, self._roots, targets, edges, vacant).compile()

    def _is_target(self, value: PyTree) -> bool:
        return id(value) in self._touched or is_compared_whole(value)

    def _find_vacant(self) -> tuple[list[tuple[int, str, Any]], set[int]]:
        """Returns references to None, and containers without variables, where the code may look.

        Those are where it names them, and in containers that it names. Of containers without
        variables, the empty ones and those of modules, to which one may be added.
        """
        named: set[int] = set()
        for edge in self._edges:  # breadth first: a container comes before what it holds
            is_container = isinstance(self._values[edge.value], CONTAINERS)
            if is_container and (edge.holder in named or self._is_named(edge.holder, *edge[1:3])):
                named.add(edge.value)
        vacant = [each for each in self._vacant if each[0] in named or self._is_named(*each)]
        bridge, values = active_bridge(), self._values
        empty = {number for number in named if not values[number]}
        if bridge is not None:
            inside = (e for e in self._edges if e.holder in named)
            empty.update(e.holder for e in inside if bridge.is_stateful(values[e.value]))
        return vacant, empty

    def _is_named(self, holder: int, kind: str, key: PyTree) -> bool:
        """Returns whether a reference is one that the code has a name for."""
        value = self._values[holder]
        if kind == "global" or isinstance(value, types.CellType):
            return True
        if isinstance(value, (types.FunctionType, functools.partial, *CONTAINERS)):
            return False
        is_users = isinstance(value, HOLDERS) or not is_of_a_library(value)
        return is_users and key in self._names

    def _leads(self, edge: Edge) -> bool:
        """Returns whether following a reference, as the code will, gives what was found."""
        try:
            return (
                ROADS[edge.kind][1](self._values[edge.holder], edge.key) is self._values[edge.value]
            )
        except Exception:
            return False
