"""Python objects that a step takes or captures: their arrays, and what a trace leaves there.

An object whose class JAX does not know as a pytree is part of the program, not an input of it. An
array that the function reads from its attributes is a constant of the program, and a value that
the function writes to them is a traced one. A method changes its object, too, and a function what
it captures. A compiled step does so once, in its trace: a loop over it would compute with the first
values for ever. All of this is found around the trace, by identity.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jec

from distjax._src import jax_compat
from distjax._src.objects.walk import find_arrays, has_variables, leak_text, names_of_globals
from distjax._src.replica.arguments import Static, function_name, is_static, user_path
from distjax._src.typing import PyTree
from distjax._src.variables.variable import Variable
from distjax.errors import TraceLeakError, message

#: What a traced value may take the place of.
_VALUES = (jax.Array, np.ndarray, np.generic, int, float, complex, Variable)
#: Equal ones are often one object.
_NUMBERS = (int, float, complex)


class _Argument(NamedTuple):
    """A Python object among the arguments, and the arrays that it held before the trace."""

    name: str
    static: Static
    held: dict[str, jax.Array]


class Surroundings:
    """What a function can see and change without returning it, as it was before its trace.

    Objects that are stateful are taken apart by a program, and are as before when it has been
    traced; one that is new may hold traced values. `inner` are the surroundings of functions that
    it runs in its trace.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        is_stateful: Callable[[object], bool],
        call: PyTree = (),
        names: Sequence[str] = (),
    ):
        self._fn, self._is_stateful = fn, is_stateful
        self._captured = self._find_captured()
        held = self._captured.items()
        self._values = {path for path, value in held if not isinstance(value, jax_compat.Tracer)}
        self._arguments: list[_Argument] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(call, is_leaf=is_static):
            if isinstance(leaf, Static):
                name = user_path(jax.tree_util.keystr(path), names)
                self._arguments.append(_Argument(name, leaf, find_arrays(leaf.value, name)))
        self.inner: list[Surroundings] = []

    @property
    def objects(self) -> list[object]:
        """The objects among the arguments."""
        return [each.static.value for each in self._arguments]

    @contextlib.contextmanager
    def watching(self) -> Generator[None]:
        """A context for the trace: see `watch_inner`."""
        outer, _this_thread.current = getattr(_this_thread, "current", None), self
        try:
            yield
        finally:
            _this_thread.current = outer

    def require_inputs(self, jaxpr: jax_compat.Jaxpr, consts: Sequence[object]) -> None:
        """Raises if the trace read an array of an object that the user did not mark as static."""
        implied = [each for each in self._arguments if each.static.is_implied and each.held]
        if not implied:
            return
        baked = {id(constant) for constant in _constants(jaxpr, consts)}
        for name, static, held in implied:
            paths = [path for path, array in held.items() if id(array) in baked]
            if paths:
                raise ValueError(_baked_text(name, static.value, paths))

    def require_no_leaks(self, results: Sequence[object]) -> None:
        """Raises if the trace has left a traced value where it outlives the trace.

        In what the function captures, only one that takes the place of a value counts: a list that
        traced values are appended to shows a trace to the user, as a debugger does. `results` are
        the Python objects among the function's results.
        """
        function = function_name(self._fn)
        self.require_in_place()
        for each in (*self.inner, self):  # the function that does it is named
            each._require_none_captured()
        before = {id(array) for each in self._arguments for array in each.held.values()}
        for name, static, _ in self._arguments:
            for path, array in find_arrays(static.value, name).items():
                if _is_tracer(array) and id(array) not in before:
                    raise TraceLeakError(leak_text(function, path, array))
        for result in results:
            if isinstance(result, jax_compat.Tracer):  # no array: a `jax.Ref`
                raise TraceLeakError(_ref_text(function, result))
            for path, array in find_arrays(result, type(result).__name__).items():
                if _is_tracer(array) and id(array) not in before:
                    raise TraceLeakError(_result_text(function, path, array))

    def require_in_place(self) -> None:
        """Raises if a place has what another had, which has something else now.

        Only the trace would do it. What is still where it was may be in a second place, too.
        Called as soon as the function ends: a loop around it may then go on to another variable.
        """
        before, after = self._captured, self._find_captured()
        changed = [p for p, x in before.items() if p in after and after[p] is not x]
        homes = {id(before[p]): p for p in changed if not isinstance(before[p], _NUMBERS)}
        for path in changed:
            home = homes.get(id(after[path]))
            if home is not None:
                raise TraceLeakError(_exchange_text(function_name(self._fn), home, path))

    def _require_none_captured(self) -> None:
        known, after = set(map(id, self._captured.values())), self._find_captured()
        for path, value in after.items():
            if id(value) in known or not (path in self._values or path.startswith("self.")):
                continue
            tracer = next(filter(_is_tracer, jax.tree.leaves(value)), None)
            if tracer is not None:
                name, is_in_object = function_name(self._fn), self._is_stateful(value)
                raise TraceLeakError(leak_text(name, path, tracer, is_in_object=is_in_object))

    def _find_captured(self) -> dict[str, Any]:
        is_one = lambda value: self._is_stateful(value) or has_variables(value)
        held: dict[str, Any] = {}
        for name, value in _outer_state(self._fn):
            held |= find_arrays(value, name, _VALUES, is_one)
        return held


#: The surroundings of the program that this thread traces.
_this_thread = threading.local()


@contextlib.contextmanager
def watch_inner(fn: Callable[..., Any], is_stateful: Callable[[object], bool]) -> Generator[None]:
    """A context in which the program that is being traced looks at what ``fn`` can change."""
    current: Surroundings | None = getattr(_this_thread, "current", None)
    inner = None if current is None else Surroundings(fn, is_stateful)
    if current is not None and inner is not None:
        current.inner.append(inner)
    yield
    if inner is not None:
        inner.require_in_place()


def _constants(jaxpr: jax_compat.Jaxpr, consts: Sequence[object]) -> Iterator[object]:
    """Yields the constants of a jaxpr and of those in its equations, at any depth."""
    yield from consts
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            for each in param if isinstance(param, (tuple, list)) else (param,):
                if isinstance(each, (jec.Jaxpr, jec.ClosedJaxpr)):
                    yield from _constants(*jax_compat.open_jaxpr(each))


def _baked_text(name: str, value: object, paths: Sequence[str]) -> str:
    return message(
        f"argument {name} needs to be a pytree, since the function reads arrays of it",
        got=f"{type(value).__name__}, with arrays at {', '.join(paths)}",
        why="JAX does not know its class, so the object is part of the compiled program, its "
        "arrays would be constants there, and later ones would never be read",
        fix=f"@jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays; "
        f"dj.static({name}) if constants are meant",
    )


def _ref_text(function: str, ref: PyTree) -> str:
    return message(
        f"{function} needs to return arrays, or pytrees of them",
        got=f"a {jax.typeof(ref)} that was made in the step",
        why="a reference made in a compiled program is gone when that has run",
        fix="return its value: return ref[...]",
    )


def _result_text(function: str, path: str, tracer: jax.Array) -> str:
    return message(
        f"{function} needs to return arrays, or pytrees of them",
        got=f"an object with a traced value of type {jax.typeof(tracer).str_short()} in {path}",
        why="JAX does not know its class, so its arrays are not results of the compiled program",
        fix="@jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays",
    )


def _exchange_text(function: str, home: str, path: str) -> str:
    return message(
        f"{function} needs to leave what it captures in its place",
        got=f"in {path} what was in {home} before",
        why="the Python code of a compiled step does not run again: they would "
        "be swapped while it is traced, and at no later call",
        fix=f"exchange them between two calls of {function}; or exchange the values of variables: "
        "a, b = v.value, w.value; v.assign(b); w.assign(a)",
    )


def _is_tracer(leaf: object) -> bool:
    return isinstance(leaf, jax_compat.Tracer)


def _outer_state(fn: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    """Yields what the function can change, by name."""
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    if isinstance(inner, types.MethodType):
        yield "self", inner.__self__
        inner = inner.__func__
    if not isinstance(inner, types.FunctionType):
        return
    code = inner.__code__
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield name, cell.cell_contents
    for name in names_of_globals(code):
        yield name, inner.__globals__.get(name)
