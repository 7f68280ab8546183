"""dj.lax: the loops and branches of `jax.lax`, whose bodies may write variables.

The body is traced once to find the variables that it writes, which are added to the carry.
Outside a distjax trace, the construct runs step by step in Python.

Arguments, results and errors are those of `jax.lax`.

Context: any.

Raises:
  TraceLeakError: the `cond_fun` of a while loop writes a variable; or the call is in
    an inner trace (`jax.jit`, `grad`), where no variable can be written.
  DivergenceError: the predicate differs per replica around an aggregated write.

Example:
  >>> count = dj.Variable(0)
  >>> @dj.jit
  ... def step(xs):
  ...     def body(total, x):
  ...         count.assign_add(1)
  ...         return total + x, None
  ...     return dj.lax.scan(body, 0.0, xs)[0]
  >>> step(jnp.arange(4.0)), int(count.value)
  (Array(6., dtype=float32), 4)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distjax._src import jax_compat, traces
from distjax._src.context import frames
from distjax._src.replica.arguments import is_array
from distjax._src.traces import struct, type_of
from distjax._src.typing import ArrayLike, PyTree
from distjax._src.variables.conversion import is_number
from distjax._src.variables.state import TraceState
from distjax.errors import TraceLeakError, message

_NOT_GIVEN = object()


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: PyTree,
    xs: PyTree = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Like `jax.lax.scan`; ``f`` may write variables."""
    options: dict[str, Any] = dict(length=length, reverse=reverse, unroll=unroll)
    outer = frames.current().state
    if outer is None:
        if _has_no_steps(xs, length) and not jax_compat.tracing():
            return _scan_no_steps(f, init, xs)
        return _step_by_step(lambda f: lax.scan(f, init, xs, **options), f)
    written = _find_written(outer, f, _types_of(init), jax.tree.map(_slice_shape, xs))

    def body(carry: PyTree, x: PyTree) -> Any:
        (inner, y), values = _with_values(outer, written, carry[1], lambda: f(carry[0], x))
        return (inner, values), y

    (final, values), ys = lax.scan(body, (init, _values(outer, written)), xs, **options)
    _write_back(outer, written, values)
    return final, ys


def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: PyTree
) -> Any:
    """Like `jax.lax.while_loop`; ``body_fun`` may write variables."""
    outer = frames.current().state
    if outer is None:
        run = lambda cond, body: lax.while_loop(cond, body, init_val)
        return _step_by_step(run, cond_fun, body_fun)
    _require_no_writes(outer, cond_fun, _types_of(init_val))
    written = _find_written(outer, body_fun, _types_of(init_val))

    def cond(carry: PyTree) -> Any:
        return _with_values(outer, written, carry[1], lambda: cond_fun(carry[0]))[0]

    def body(carry: PyTree) -> Any:
        return _with_values(outer, written, carry[1], lambda: body_fun(carry[0]))

    final, values = lax.while_loop(cond, body, (init_val, _values(outer, written)))
    _write_back(outer, written, values)
    return final


def fori_loop(
    lower: ArrayLike,
    upper: ArrayLike,
    body_fun: Callable[[Any, Any], Any],
    init_val: PyTree,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Like `jax.lax.fori_loop`; ``body_fun`` may write variables."""
    outer = frames.current().state
    if outer is None:
        run = lambda body: lax.fori_loop(lower, upper, body, init_val, unroll=unroll)
        return _step_by_step(run, body_fun)
    written = _find_written(outer, body_fun, *_types_of((lower, init_val)))

    def body(i: jax.Array, carry: PyTree) -> Any:
        return _with_values(outer, written, carry[1], lambda: body_fun(i, carry[0]))

    start = init_val, _values(outer, written)
    final, values = lax.fori_loop(lower, upper, body, start, unroll=unroll)
    _write_back(outer, written, values)
    return final


def cond(
    pred: ArrayLike,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: PyTree,
    operand: PyTree = _NOT_GIVEN,
) -> Any:
    """Like `jax.lax.cond`; both branches may write variables."""
    operands = _all_operands("cond", operands, operand)
    outer = frames.current().state
    if outer is None:
        return _step_by_step(lambda *fns: lax.cond(pred, *fns, *operands), true_fun, false_fun)
    return _branch(outer, lambda fns: lax.cond(pred, *fns), [true_fun, false_fun], operands)


def switch(
    index: ArrayLike,
    branches: Sequence[Callable[..., Any]],
    *operands: PyTree,
    operand: PyTree = _NOT_GIVEN,
) -> Any:
    """Like `jax.lax.switch`; the branches may write variables."""
    operands = _all_operands("switch", operands, operand)
    outer = frames.current().state
    if outer is None:
        return _step_by_step(lambda *fns: lax.switch(index, fns, *operands), *branches)
    return _branch(outer, lambda fns: lax.switch(index, fns), branches, operands)


def _all_operands(method: str, operands: tuple[Any, ...], operand: PyTree) -> tuple[Any, ...]:
    if operand is _NOT_GIVEN:
        return operands
    if not operands:
        return (operand,)
    raise TypeError(
        message(
            f"{method} needs its operands by position, or one as operand=",
            got=f"{len(operands)} by position and operand=",
            why="the branches take either the one or the others",
            fix=f"dj.lax.{method}(..., x, y)",
        )
    )


def _branch(
    outer: TraceState,
    select: Callable[[list[Callable[[], Any]]], Any],
    branches: Sequence[Callable[..., Any]],
    operands: tuple[Any, ...],
) -> Any:
    written: dict[Any, None] = {}
    operands = _as_arrays(operands)
    for fn in branches:
        written.update(dict.fromkeys(_find_written(outer, lambda fn=fn: fn(*operands))))
    start = _values(outer, list(written))

    def traced(fn: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: _with_values(outer, list(written), start, lambda: fn(*operands))

    out, values = select([traced(fn) for fn in branches])
    _write_back(outer, list(written), values)
    return out


# -- variables as part of the carry -------------------------------------------


def _step_by_step(run: Callable[..., Any], *fns: Callable[..., Any]) -> Any:
    """Returns ``run(*fns)``; outside of traces uncompiled, with arrays for the functions."""
    if jax_compat.tracing():
        return run(*fns)
    with jax.disable_jit():
        return run(*map(_on_arrays, fns))


def _on_arrays(fn: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(fn)(lambda *args: fn(*_as_arrays(args)))


def _as_arrays(tree: PyTree) -> Any:
    """Returns `tree` with numbers and numpy arrays as JAX arrays, as bodies of `jax.lax` get."""
    return jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) or is_number(x) else x, tree)


def _types_of(tree: PyTree) -> Any:
    return jax.tree.map(type_of, tree)


def _has_no_steps(xs: PyTree, length: int | None) -> bool:
    leaves = jax.tree.leaves(xs)
    return (length == 0 or bool(leaves and length is None)) and all(
        np.shape(x)[:1] == (0,) for x in leaves
    )


def _scan_no_steps(f: Callable[[Any, Any], tuple[Any, Any]], init: PyTree, xs: PyTree) -> Any:
    """Returns what a scan without steps gives, which JAX cannot run step by step."""
    found: list[Any] = []

    def traced(carry: PyTree, x: PyTree) -> Any:
        state = TraceState(local_view=False)
        with frames.with_frame(dataclasses.replace(frames.current(), state=state)):
            found[:] = [_types_of(f(carry, x)[1])]

    types = _types_of(init), jax.tree.map(_slice_shape, xs)
    traces.trace_jaxpr(traced, types, only_shapes=True)
    return _as_arrays(init), jax.tree.map(lambda y: jnp.zeros((0, *y.shape), y.dtype), found[0])


def _inner_state(outer: TraceState) -> TraceState:
    return TraceState(local_view=outer.local_view, parent=outer)


def _slice_shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    aval = jax_compat.aval_of(x)
    return struct(aval.shape[1:], aval.dtype)


def in_inner_trace(outer: TraceState, fn: Callable[[], Any]) -> Any:
    """Returns ``fn()`` run in a trace nested in `outer`, discarding variable writes."""
    with frames.with_frame(dataclasses.replace(frames.current(), state=_inner_state(outer))):
        return fn()


def _find_written(outer: TraceState, fn: Callable[..., Any], *shapes: PyTree) -> list[Any]:
    """Returns the variables that ``fn`` writes, found by a shape-only trace."""
    written: list[Any] = []

    def traced(*args: PyTree) -> Any:
        state = _inner_state(outer)
        with frames.with_frame(dataclasses.replace(frames.current(), state=state)):
            fn(*args)
        written[:] = list(state.written)

    traces.trace_jaxpr(traced, shapes, only_shapes=True)
    for variable in written:
        outer.require_writable(variable)
    return written


def _require_no_writes(outer: TraceState, fn: Callable[..., Any], *shapes: PyTree) -> None:
    for variable in _find_written(outer, fn, *shapes):
        raise TraceLeakError(
            f"cond_fun of while_loop needs to leave variable {variable.name!r} as it is",
            got="a write inside cond_fun",
            why="a condition has no carry of its own",
            fix="v.assign(x) in body_fun",
        )


def _with_values(
    outer: TraceState, variables: Sequence[Any], values: Sequence[Any], fn: Callable[[], Any]
) -> tuple[Any, list[Any]]:
    state = _inner_state(outer)
    for variable, value in zip(variables, values, strict=True):
        state.bind(variable, value)
    with frames.with_frame(dataclasses.replace(frames.current(), state=state)):
        out = fn()
    return out, [state.read(v) for v in variables]


def _values(outer: TraceState, variables: Sequence[Any]) -> list[Any]:
    return [outer.read(v) for v in variables]


def _write_back(outer: TraceState, variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        outer.write(variable, value)
