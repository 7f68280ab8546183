"""The traces that distjax makes: their names, one equation for what was traced, types of values."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeGuard

import jax
import numpy as np
from jax import core
from jax.core import AbstractValue
from jax.sharding import AxisType, Sharding

from distjax._src import hooks, jax_compat
from distjax._src.jax_compat import ShapedArray, Var
from distjax._src.typing import ArrayLike, DTypeLike

# -- cache keys for traces inside of a trace -----------------------------------
# Cache keys for functions that JAX traces inside a distjax trace.
#
# JAX caches the traces of inner `jit`, `scan`, `cond` and `remat` by function, avals and axis
# names, but not by distjax's frames. Such a function may read a variable, and so return a tracer of
# another trace. Each active trace therefore binds an axis name of its own, which becomes part of
# the key. When something that such a function may have read changes within a trace, that axis gets
# another size. When the trace ends, its name is reused, and with it the cached traces of jnp's own
# functions, unless an inner function read distjax's state in that trace (`forget_inner_traces`).


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
    """The axis name that identifies one active trace, and is shared with no other active one.

    The trace is None until it has begun. A later one may use the name again if it `is_reusable`.
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


# -- one equation that calls what was traced -----------------------------------
# Stages a traced jaxpr as one equation, whose code JAX does not trace again.
#
# Evaluating a jaxpr in `jit` binds each of its equations anew, including those inside `shard_map`.
# An equation that calls it is bound once, but it keeps the types of its trace, whereas evaluation
# adapts to other memory spaces and axes. So a call is staged only for operands of the traced types.
# The code is also evaluated where nothing is being traced: by the reference interpreter, and when
# `jax.debug_nans` reruns a program to find the operation at fault.


def stage_call(
    jaxpr: jax_compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any], name: str
) -> list[Any]:
    """Returns the outputs of `jaxpr`: of one staged call, or evaluated where types may differ."""
    invars, operands = [*jaxpr.constvars, *jaxpr.invars], [*consts, *args]
    example = _example_call()
    if example is None or not jax_compat.tracing() or not have_types_of(operands, invars):
        return _evaluate(jaxpr, consts, args)
    values = dict(zip(invars, operands, strict=True))
    outvars = [v for v in jaxpr.outvars if not isinstance(v, jax_compat.Literal)]
    # A result that is an operand stays out of the call, so that JAX hands it on uncopied.
    computed = list(dict.fromkeys(v for v in outvars if v not in values))
    code = jax_compat.new_jaxpr(jaxpr, (), invars, computed, jaxpr.eqns)
    values.update(zip(computed, _bind(example, code, operands, name), strict=True))
    return [v.val if isinstance(v, jax_compat.Literal) else values[v] for v in jaxpr.outvars]


def _evaluate(jaxpr: jax_compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    if not any(map(_maps_some_axes, jax_compat.equations_of(jaxpr))) or jax_compat.staging():
        return jax_compat.eval_jaxpr(jaxpr, consts, args)
    return run_compiled(lambda *args: jax_compat.eval_jaxpr(jaxpr, consts, args), args)


def run_compiled(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns ``fn(*args)``, compiled under `jax.disable_jit` too.

    Before 0.12, JAX maps over some axes of a mesh in compiled code only.
    """
    with jax.disable_jit(False):
        return jax.jit(fn)(*args)


def _maps_some_axes(eqn: jax_compat.JaxprEqn) -> bool:
    if eqn.primitive.name != "shard_map":
        return False
    return set(eqn.params["newly_manual_axes"]) != set(eqn.params["mesh"].axis_names)


def _example_call() -> jax_compat.JaxprEqn | None:
    """Returns an equation that calls a jaxpr; None under `jax.disable_jit`."""
    # A new function each time: JAX's cache of traces would keep entries for one that stays.
    equations = jax.make_jaxpr(jax.jit(lambda x: x))(np.int32(0)).eqns
    return equations[0] if equations else None


def _bind(
    example: jax_compat.JaxprEqn, code: jax_compat.Jaxpr, operands: Sequence[Any], name: str
) -> Sequence[Any]:
    params = dict(example.params, jaxpr=jax_compat.ClosedJaxpr(code, ()), name=name)
    for key in ("in_shardings", "in_layouts", "donated_invars"):
        params[key] *= len(operands)
    for key in ("out_shardings", "out_layouts"):
        params[key] *= len(code.outvars)
    return example.primitive.bind(*operands, **params)


# -- types ---------------------------------------------------------------------
# The types with which code is traced for values, and what stands for an array with a type only.
#
# The type that JAX gives an array also names a mesh and a sharding. These matter to a trace only on
# explicit axes, or on manual ones over which the value varies; all other arrays of one shape, dtype
# and memory space share a trace.


def type_of(value: ArrayLike) -> Any:
    """Returns the type that an array or Python number has in a trace."""
    return as_traced(jax.typeof(value))


def as_traced(aval: AbstractValue) -> Any:
    """Returns a JAX type without the sharding that does not matter."""
    if not isinstance(aval, ShapedArray):  # of a mutable array
        return aval
    is_explicit = AxisType.Explicit in aval.sharding.mesh.axis_types
    if is_explicit or aval.manual_axis_type.varying:
        return aval
    return aval.update(sharding=ShapedArray(aval.shape, aval.dtype).sharding)


def have_types_of(operands: Sequence[Any], atoms: Sequence[Var]) -> bool:
    """Returns whether `operands` are arrays of the types that `atoms` were traced with."""
    given = list(map(type_of, operands))
    traced = [as_traced(atom.aval) for atom in atoms]
    return given == traced and all(isinstance(t, ShapedArray) for t in given)


def struct(
    shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None = None
) -> jax.ShapeDtypeStruct:
    """Returns what stands for an array where code is traced or compiled, but not run."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def is_struct(value: object) -> TypeGuard[jax.ShapeDtypeStruct]:
    """Returns whether `value` stands for an array."""
    return isinstance(value, jax.ShapeDtypeStruct)
