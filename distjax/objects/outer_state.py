"""What a function can change without returning it, and the traced values that it leaves there.

A method changes its object, and a function what it captures. A compiled step does so once, in its
trace: a loop over it would compute with the first values for ever.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import numpy as np

from distjax import jax_compat
from distjax.errors import TraceLeakError, message
from distjax.objects.captures import names_of_globals
from distjax.objects.following import has_variables
from distjax.objects.held_arrays import find_arrays, leak_text
from distjax.objects.stateful import active_bridge
from distjax.replica.arguments import function_name
from distjax.variables.stored_variable import StoredVariable

#: What a traced value may take the place of.
_VALUES = (jax.Array, np.ndarray, np.generic, int, float, complex, StoredVariable)
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
