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
from distjax.errors import TraceLeakError
from distjax.objects.captures import names_of_globals
from distjax.objects.held_arrays import find_arrays, leak_text
from distjax.objects.stateful import active_bridge
from distjax.replica.user_names import function_name

#: What a traced value may take the place of.
_VALUES = (jax.Array, np.ndarray, np.generic, int, float, complex)
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
      TraceLeakError: it has.
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
    for path, value in _held_values(fn).items():
        if id(value) in known or not (path in values or path.startswith("self.")):
            continue
        is_in_object = _is_stateful(value)
        if is_in_object and not is_whole_program:
            continue
        tracer = next(filter(_is_tracer, jax.tree.leaves(value)), None)
        if tracer is not None:
            text = leak_text(function_name(fn), path, tracer, is_in_object=is_in_object)
            raise TraceLeakError(text)


def _is_tracer(leaf: object) -> bool:
    return isinstance(leaf, jax_compat.Tracer)


def _held_values(fn: Callable[..., Any]) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for name, value in _outer_state(fn):
        held |= find_arrays(value, name, _VALUES, _is_stateful)
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


def _is_stateful(value: object) -> bool:
    bridge = active_bridge()
    return bridge is not None and bridge.is_stateful(value)
