"""Cache keys for functions that JAX traces inside a distjax trace.

JAX caches the traces of inner `jit`, `scan`, `cond` and `remat` by function, avals and axis names,
but not by distjax's frames. Such a function may read a variable, and so return a tracer of another
trace. Each active trace therefore binds an axis name of its own, which becomes part of the key.
When something that such a function may have read changes within a trace, that axis gets another
size. When the trace ends, its name is reused, and with it the cached traces of jnp's own functions,
unless an inner function read distjax's state in that trace (`forget_inner_traces`).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
from jax import core

from distjax._src import hooks, jax_compat

_PREFIX = "_distjax_trace_"


def trace_jaxpr(
    fn: Callable[..., Any],
    avals: Sequence[Any],
    axis_env: Sequence[tuple[str, int]] = (),
    *,
    only_shapes: bool = False,
) -> tuple[jax_compat.Jaxpr, list[Any]]:
    """Traces `fn` under a name of its own; returns its jaxpr and the constants it closed over.

    If `fn` keeps values of the trace, it calls `begin_trace` first, as a `TraceState` does. It is a
    new function each time, since JAX's caches go by it. A trace that is made only for shapes proves
    nothing to those that listen (see `hooks`).
    """
    own = _TraceName()
    try:
        with hooks.only_shapes() if only_shapes else contextlib.nullcontext():
            closed = jax.make_jaxpr(fn, axis_env=[*axis_env, (own.name, 1)])(*avals)
    except BaseException:
        own.is_reusable = False
        raise
    finally:
        own.end()
    return jax_compat.open_jaxpr(closed)


class _TraceName:
    """The axis name that identifies one active trace.

    Attributes:
      name: the name, shared with no other active trace.
      trace: the trace, once it has begun.
      is_reusable: whether a later trace may reuse the name.
      thread: the thread that traces.
    """

    _free: ClassVar[list[str]] = []
    under_way: ClassVar[list[_TraceName]] = []
    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        try:
            self.name = self._free.pop()
        except IndexError:
            self.name = f"{_PREFIX}{next(self._numbers)}"
        self.trace: core.Trace | None = None
        self.is_reusable = True
        self.thread = threading.get_ident()
        self._size = 1
        self.under_way.append(self)

    def renew(self) -> None:
        """Gives the rest of the trace another key in JAX's caches."""
        self._size += 1  # no code uses the axis, so its size does not change the program
        jax_compat.resize_axis(self.name, self._size)

    def end(self) -> None:
        """Releases the name."""
        self.under_way.remove(self)
        self.trace = None
        if self.is_reusable:
            self._free.append(self.name)


def begin_trace() -> core.Trace:
    """Returns the current trace, known from now on as that of the innermost `trace_jaxpr`."""
    trace, thread = jax_compat.current_trace(), threading.get_ident()
    own = next((x for x in reversed(tuple(_TraceName.under_way)) if x.thread == thread), None)
    if own is not None and own.trace is None:
        own.trace = trace
    return trace


def forget_inner_traces(trace: core.Trace) -> None:
    """Keeps later traces from reusing what JAX cached for functions inside `trace`.

    For an inner function that depends on more than JAX's cache key covers.
    """
    is_inside = False
    for each in tuple(_TraceName.under_way):  # outermost first
        is_inside = is_inside or each.trace is trace
        each.is_reusable = each.is_reusable and not is_inside


def renew_inner_traces() -> None:
    """Keeps inner functions from reusing their earlier traces within this trace.

    For a change of something outside JAX's cache key that they may read: a variable's value, or
    the active strategy. A no-op while no inner function has read any of these.
    """
    own = [x for x in tuple(_TraceName.under_way) if x.thread == threading.get_ident()]
    if any(not each.is_reusable for each in own):
        own[-1].renew()
