"""Reductions of bfloat16 that are float32 before XLA sees them.

XLA on CPU reduces bfloat16 in float32. Where some axes of the mesh are automatic, as model axes
are, its pass that changes the type (`AllReducePromotion`, in JAX 0.10.2 to 0.12) does not know the
copy in the code of such a reduction, and aborts the process. So the type is changed before, in the
code of each replica. The results are those that XLA would give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import AbstractValue

from distjax import inner_traces, jax_compat
from distjax.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, ShapedArray, Var
from distjax.placement.topology import Topology
from distjax.typing import DTypeLike

#: Primitives that reduce, and one whose derivative does.
_REDUCTIONS = frozenset("psum psum_invariant pmax pmin reduce_scatter all_gather".split())


def needs_wide_reductions(topology: Topology) -> bool:
    """Returns whether XLA cannot reduce bfloat16 over these replicas."""
    return bool(topology.model_axes) and topology.devices[0].platform == "cpu"


def widen_reductions(
    fn: Callable[..., Sequence[Any]], args: Sequence[Any], args_varying: Sequence[bool]
) -> tuple[Callable[..., Sequence[Any]], list[Any]]:
    """Returns what to map over the replicas, and its arguments, with float32 for bfloat16.

    Args:
      fn: what one replica computes.
      args: its arguments, in the global view.
      args_varying: per argument, whether replicas see different values.
    """
    # The derivative of an argument that is equal on all replicas is summed over them.
    is_summed = [
        not varying and _is_narrow(jax.typeof(x))
        for x, varying in zip(args, args_varying, strict=True)
    ]

    def cast(values: Sequence[Any], dtype: DTypeLike) -> list[Any]:
        return [
            lax.convert_element_type(x, dtype) if summed else x
            for x, summed in zip(values, is_summed, strict=True)
        ]

    def widened(*local: jax.Array) -> Sequence[Any]:
        own = cast(local, jnp.bfloat16)
        jaxpr, consts = inner_traces.trace_jaxpr(fn, own)
        return jax_compat.eval_jaxpr(_Widener().widen(jaxpr), consts, own)

    return widened, cast(args, jnp.float32)


class _Widener:
    """Widens the reductions in code and in what it calls."""

    def __init__(self):
        #: By id: code and its widened form, held so that ids stay theirs.
        self._widened: dict[int, tuple[Any, Any]] = {}

    def widen(self, code: Jaxpr | ClosedJaxpr) -> Any:
        """Returns the code with its reductions in float32: itself if there are none."""
        if id(code) not in self._widened:  # JAX lowers code once, however often it is called
            self._widened[id(code)] = code, self._widen(code)
        return self._widened[id(code)][1]

    def _widen(self, code: Jaxpr | ClosedJaxpr) -> Any:
        jaxpr, consts = jax_compat.open_jaxpr(code)
        eqns = [e for eqn in jaxpr.eqns for e in self._widen_equation(eqn)]
        if eqns == jaxpr.eqns:
            return code
        widened = jaxpr.replace(eqns=eqns)
        return widened if code is jaxpr else ClosedJaxpr(widened, consts)

    def _widen_equation(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        if eqn.primitive.name in _REDUCTIONS and any(_is_narrow(v.aval) for v in eqn.invars):
            return _in_float32(eqn)
        params = {key: self._widen_param(value) for key, value in eqn.params.items()}
        is_same = all(params[key] is value for key, value in eqn.params.items())
        return [eqn if is_same else eqn.replace(params=params)]

    def _widen_param(self, value: object) -> Any:
        if isinstance(value, (Jaxpr, ClosedJaxpr)):
            return self.widen(value)
        if not isinstance(value, tuple):
            return value
        parts = [self._widen_param(part) for part in value]
        if all(new is part for new, part in zip(parts, value, strict=True)):
            return value
        return getattr(type(value), "_make", tuple)(parts)  # those of a solver have names


def _in_float32(eqn: JaxprEqn) -> list[JaxprEqn]:
    """Returns the equations that do what a reduction does, in float32."""
    ins, outs = list(map(_as_wide, eqn.invars)), list(map(_as_wide, eqn.outvars))
    changes = [(v, wide, eqn) for v, wide in zip(eqn.invars, ins, strict=True) if v is not wide]
    returns = [(wide, v, eqn) for v, wide in zip(eqn.outvars, outs, strict=True) if v is not wide]
    reduction = eqn.replace(invars=ins, outvars=outs)
    return [*starmap(_conversion, changes), reduction, *starmap(_conversion, returns)]


def _as_wide(atom: Var | Literal) -> Any:
    if not _is_narrow(atom.aval):
        return atom
    return Var(atom.aval.update(dtype=jnp.dtype(jnp.float32), weak_type=False))


def _conversion(source: Var | Literal, target: Var, place: JaxprEqn) -> JaxprEqn:
    """Returns the equation that converts one variable to the type of another, at a place."""
    dtypes = jnp.bfloat16, jnp.float32
    given, made = reversed(dtypes) if _is_narrow(target.aval) else dtypes
    convert = lambda x: lax.convert_element_type(x, made)
    (eqn,) = jax.make_jaxpr(convert)(jax.ShapeDtypeStruct((), given)).eqns
    return eqn.replace(
        invars=[source], outvars=[target], source_info=place.source_info, ctx=place.ctx
    )


def _is_narrow(aval: AbstractValue) -> bool:
    return isinstance(aval, ShapedArray) and aval.dtype == jnp.bfloat16
