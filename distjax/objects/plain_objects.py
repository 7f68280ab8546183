"""Python objects that a step takes or captures: their arrays, and what a trace leaves there."""

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

from distjax import jax_compat
from distjax.errors import TraceLeakError, message
from distjax.objects.reached import has_variables
from distjax.objects.stateful import active_bridge
from distjax.objects.walk import find_arrays, leak_text, names_of_globals
from distjax.replica.arguments import Static, function_name, is_static, user_path
from distjax.typing import PyTree
from distjax.variables.variable import Variable

# -- object arguments ---------------------------------------------------------
# Python objects among the arguments, and the arrays that they hold.
#
# An object whose class JAX does not know as a pytree is part of the program, not an input of it. An
# array that the function reads from its attributes is a constant of the program, and a value that
# the function writes to them is a traced one. Both are found around the trace, by identity.


class _Argument(NamedTuple):
    """A Python object among the arguments.

    Attributes:
      name: the user's name of it.
      static: the object, as part of the program.
      held: the arrays that it held before the trace, by their names.
    """

    name: str
    static: Static
    held: dict[str, jax.Array]


class ObjectArguments:
    """The Python objects among the arguments of a function that is about to be traced.

    Args:
      call: (args, kwargs); objects among them are Static.
      names: names of the positional arguments.
    """

    def __init__(self, call: PyTree, names: Sequence[str]):
        pairs = jax.tree_util.tree_leaves_with_path(call, is_leaf=is_static)
        self._arguments: list[_Argument] = []
        for path, leaf in pairs:
            if isinstance(leaf, Static):
                name = user_path(jax.tree_util.keystr(path), names)
                self._arguments.append(_Argument(name, leaf, find_arrays(leaf.value, name)))

    @property
    def values(self) -> list[object]:
        """The objects."""
        return [each.static.value for each in self._arguments]

    def require_inputs(self, jaxpr: jax_compat.Jaxpr, consts: Sequence[object]) -> None:
        """Raises if the trace read an array of an object that the user did not mark as static.

        Args:
          jaxpr: the trace.
          consts: its constants.

        Raises:
          ValueError: it did.
        """
        implied = [each for each in self._arguments if each.static.is_implied and each.held]
        if not implied:
            return
        baked = {id(constant) for constant in _constants(jaxpr, consts)}
        for name, static, held in implied:
            paths = [path for path, array in held.items() if id(array) in baked]
            if paths:
                raise ValueError(_baked_text(name, static.value, paths))

    def require_no_leaks(self, function: str, results: Sequence[object]) -> None:
        """Raises if the trace has left a traced value in an object.

        Args:
          function: the name of the function that was traced.
          results: the Python objects among its results.

        Raises:
          TraceLeakError: it has.
        """
        before = {id(array) for each in self._arguments for array in each.held.values()}
        for name, static, _ in self._arguments:
            for path, array in find_arrays(static.value, name).items():
                if isinstance(array, jax_compat.Tracer) and id(array) not in before:
                    raise TraceLeakError(leak_text(function, path, array))
        for result in results:
            if isinstance(result, jax_compat.Tracer):  # no array: a `jax.Ref`
                raise TraceLeakError(_ref_text(function, result))
            for path, array in find_arrays(result, type(result).__name__).items():
                if isinstance(array, jax_compat.Tracer) and id(array) not in before:
                    raise TraceLeakError(_result_text(function, path, array))


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
        why="JAX does not know its class, so its arrays are no results of the compiled program",
        fix="@jax.tree_util.register_dataclass, flax.struct.dataclass, or a dict of its arrays",
    )


# -- outer state --------------------------------------------------------------
# What a function can change without returning it, and the traced values that it leaves there.
#
# A method changes its object, and a function what it captures. A compiled step does so once, in its
# trace: a loop over it would compute with the first values for ever.


#: What a traced value may take the place of.
_VALUES = (jax.Array, np.ndarray, np.generic, int, float, complex, Variable)
#: Equal ones are often one object.
_NUMBERS = (int, float, complex)
#: The checks of the inner traces of this thread's current program.
_this_thread = threading.local()


@contextlib.contextmanager
def checking_outer_state(
    fn: Callable[..., Any], *, is_whole_program: bool = True
) -> Generator[None]:
    """Raises if the trace of ``fn`` inside leaves a traced value in what it can change.

    In what a function captures, only one that takes the place of a value counts: a list that
    traced values are appended to shows a trace to the user, as a debugger does. Objects of a bridge
    hold traced values until the whole program is traced; then only one that is new, and none of the
    program's, still does. What an inner trace leaves there is looked for when the whole program
    is traced.

    Args:
      fn: the function.
      is_whole_program: whether the program is traced when ``fn`` is.

    Raises:
      TraceLeakError: it has; or it has exchanged what it captures.
    """
    before = _held_values(fn)
    values = {path for path, value in before.items() if not isinstance(value, jax_compat.Tracer)}
    check = functools.partial(_require_none_left, fn, before, values)
    outer = getattr(_this_thread, "checks", None)
    if is_whole_program:
        _this_thread.checks = []
    try:
        yield
        check(is_whole_program)
        if is_whole_program:
            for inner in _this_thread.checks:
                inner(True)
        elif outer is not None:
            outer.append(check)
    finally:
        _this_thread.checks = outer


def _require_none_left(
    fn: Callable[..., Any], before: dict[str, Any], values: set[str], is_whole_program: bool
) -> None:
    """Raises for what `checking_outer_state` looks for."""
    known = set(map(id, before.values()))
    after = _held_values(fn)
    _require_in_place(fn, before, after)
    for path, value in after.items():
        if id(value) in known or not (path in values or path.startswith("self.")):
            continue
        is_in_object = _is_stateful(value)
        if is_in_object and not is_whole_program:
            continue
        tracer = next(filter(_is_tracer, jax.tree.leaves(value)), None)
        if tracer is not None:
            text = leak_text(function_name(fn), path, tracer, is_in_object=is_in_object)
            raise TraceLeakError(text)


def _require_in_place(
    fn: Callable[..., Any], before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Raises if a place has what another had, which has something else now.

    Only the trace would do it. What is still where it was may be in a second place, too.
    """
    changed = [p for p, x in before.items() if p in after and after[p] is not x]
    homes = {id(before[p]): p for p in changed if not isinstance(before[p], _NUMBERS)}
    for path in changed:
        home = homes.get(id(after[path]))
        if home is not None:
            raise TraceLeakError(_exchange_text(function_name(fn), home, path))


def _exchange_text(function: str, home: str, path: str) -> str:
    return message(
        f"{function} needs to leave what it captures in its place",
        got=f"in {path} what was in {home} before",
        why="a compiled step does not run its Python code again: they would be exchanged in the "
        "trace, and at no later call",
        fix=f"exchange them between two calls of {function}; or exchange the values of variables: "
        "a, b = v.value, w.value; v.assign(b); w.assign(a)",
    )


def _is_tracer(leaf: object) -> bool:
    return isinstance(leaf, jax_compat.Tracer)


def _held_values(fn: Callable[..., Any]) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for name, value in _outer_state(fn):
        held |= find_arrays(value, name, _VALUES, _is_one)
    return held


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


def _is_one(value: object) -> bool:
    """Returns whether a value counts as one, whatever it holds."""
    return _is_stateful(value) or has_variables(value)


def _is_stateful(value: object) -> bool:
    bridge = active_bridge()
    return bridge is not None and bridge.is_stateful(value)
