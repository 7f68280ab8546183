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
None or an empty container, that it still is one.
"""

from __future__ import annotations

import collections
import contextvars
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from distjax.objects.captures import is_library, is_of_a_library, names_of_globals
from distjax.objects.following import ROADS, Comparison, Edge, has_variables, is_compared_whole
from distjax.objects.references import (
    ATOMS,
    CONTAINERS,
    contents_of,
    functions_in,
    items_of,
    module_of,
    names_in,
    names_in_texts,
    reference_to,
    stored_attributes,
)
from distjax.placement.per_replica import PerReplica
from distjax.replica.arguments import Static
from distjax.typing import PyTree
from distjax.variables.stored_variable import StoredVariable

#: How many objects are searched.
_MAX_OBJECTS = 20_000
_ARRAYS = (jax.Array, np.ndarray, np.generic, PerReplica)
#: Classes of Python that hold what the user puts into them.
_HOLDERS = (types.SimpleNamespace, threading.local, collections.ChainMap, collections.UserDict)
_OF_PARTIALS = ("func", "args", "keywords")


class Reached:
    """The references through which the traces of one program reached what they touched.

    Attributes:
      is_current: returns whether they lead to the same objects now; None: there are none.
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
        """Records one more trace.

        Args:
          roots: the function, and Python objects among its arguments.
          touched: the variables that it read, wrote or made.
        """
        for root in roots:
            parts = (
                (root.__func__, root.__self__) if isinstance(root, types.MethodType) else (root,)
            )
            self._roots.update((id(part), reference_to(part)) for part in parts)
        self._touched.update(dict.fromkeys(touched))
        self.is_current = _Search(list(self._roots.values()), self._touched).compile()


class _Search:
    """Finds the references from roots to what was touched.

    Args:
      roots: weak references to where the search begins.
      touched: the variables to find.
    """

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
            for name in self._names - seen:
                seen.add(name)
                if name in vars(holder):
                    self._add_member(number, holder, name, vars(holder)[name])
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
        """Yields what `value` refers to: (kind, key, part)."""
        if isinstance(value, StoredVariable) or is_compared_whole(value):
            return
        if isinstance(value, CONTAINERS):
            yield from items_of(value)
        elif isinstance(value, types.CellType):
            yield from contents_of(value)
        elif isinstance(value, types.MethodType):
            yield "attribute", "__func__", value.__func__
            yield "attribute", "__self__", value.__self__
        elif isinstance(value, functools.partial):
            yield from (("attribute", name, getattr(value, name)) for name in _OF_PARTIALS)
        elif isinstance(value, weakref.ref):
            yield "call", None, value()
        elif isinstance(value, contextvars.ContextVar):
            yield "context", None, value.get(None)
        elif isinstance(value, (types.ModuleType, type)):
            if not is_library(module_of(value)):
                self._by_name.append((number, set()))
        elif isinstance(value, Static):
            yield "attribute", "value", value.value
        else:
            yield from self._parts_of_object(value)

    def _parts_of_object(self, value: PyTree) -> Iterator[tuple[str, Any, Any]]:
        if isinstance(value, types.FunctionType) and not is_of_a_library(value):
            yield from self._parts_of_function(value)
        elif has_variables(value):
            chosen = getattr(type(value), "reached_parts", None)
            for kind, name, part in stored_attributes(value):
                if chosen is None or name in chosen:
                    yield kind, name, part
        elif is_of_a_library(value) and not isinstance(value, _HOLDERS):
            wrapped = getattr(value, "__wrapped__", None)
            if wrapped is not None:
                yield "attribute", "__wrapped__", wrapped
        else:
            for cls in type(value).__mro__:
                if not is_library(module_of(cls)):
                    self._add_root(cls, weakref.ref(cls))
            self._names.add("__call__")
            yield from stored_attributes(value)

    def _parts_of_function(self, fn: types.FunctionType) -> Iterator[tuple[str, Any, Any]]:
        self._names.update(names_in(fn.__code__))
        if fn.__closure__:
            yield "attribute", "__closure__", fn.__closure__
        named = names_of_globals(fn.__code__)
        if "globals" in named:  # globals()["loss"]
            named = (*named, *names_in_texts(fn.__code__))
        for name in named:
            place = id(fn.__globals__), name
            if name in fn.__globals__ and place not in self._globals:
                self._globals.add(place)
                yield "global", name, fn.__globals__[name]
        for name in ("__defaults__", "__kwdefaults__"):
            if (part := getattr(fn, name)) is not None:
                yield "attribute", name, part
        for name, part in vars(fn).items():
            yield "attribute", name, part

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
        """Returns the references to None, and the empty containers, where the code may look.

        Those are where it names them, and in containers that it names.
        """
        named: set[int] = set()
        for edge in self._edges:  # breadth first: a container comes before what it holds
            is_container = isinstance(self._values[edge.value], CONTAINERS)
            if is_container and (edge.holder in named or self._is_named(edge.holder, *edge[1:3])):
                named.add(edge.value)
        vacant = [each for each in self._vacant if each[0] in named or self._is_named(*each)]
        return vacant, {number for number in named if not self._values[number]}

    def _is_named(self, holder: int, kind: str, key: PyTree) -> bool:
        """Returns whether a reference is one that the code has a name for."""
        value = self._values[holder]
        if kind == "global" or isinstance(value, types.CellType):
            return True
        if isinstance(value, (types.FunctionType, functools.partial, *CONTAINERS)):
            return False
        is_users = isinstance(value, _HOLDERS) or not is_of_a_library(value)
        return is_users and key in self._names

    def _leads(self, edge: Edge) -> bool:
        """Returns whether following a reference, as the code will, gives what was found."""
        try:
            return (
                ROADS[edge.kind][1](self._values[edge.holder], edge.key) is self._values[edge.value]
            )
        except Exception:
            return False
