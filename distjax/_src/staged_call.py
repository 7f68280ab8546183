"""Stages a traced jaxpr as one equation, whose code JAX does not trace again.

Evaluating a jaxpr in `jit` binds each of its equations anew, including those inside `shard_map`. An
equation that calls it is bound once, but it keeps the types of its trace, whereas evaluation adapts
to other memory spaces and axes. So a call is staged only for operands of the traced types. The code
is also evaluated where nothing is being traced: under `jax.disable_jit`, and when `jax.debug_nans`
reruns a program to find the operation at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from distjax._src import jax_compat
from distjax._src.traced_types import have_types_of


def stage_call(
    jaxpr: jax_compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any], name: str
) -> list[Any]:
    """Returns the outputs of `jaxpr`: of one staged call, or evaluated where types may differ.

    Args:
      jaxpr: the code.
      consts: values of its constvars.
      args: values of its invars.
      name: what the call is named in the compiled program.
    """
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
    if not any(map(_maps_some_axes, jaxpr.eqns)) or jax_compat.staging():
        return jax_compat.eval_jaxpr(jaxpr, consts, args)
    return run_compiled(lambda *args: jax_compat.eval_jaxpr(jaxpr, consts, args), args)


def run_compiled(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Returns ``fn(*args)``, compiled under `jax.disable_jit` too.

    Before 0.12, JAX maps over some axes of a mesh in compiled code only.
    """
    with jax.disable_jit(False):
        return jax.jit(fn)(*args)


def _maps_some_axes(eqn: jax_compat.JaxprEqn) -> bool:
    if eqn.primitive.name == "shard_map":
        return set(eqn.params["newly_manual_axes"]) != set(eqn.params["mesh"].axis_names)
    return any(_maps_some_axes(e) for sub in jax_compat.sub_jaxprs(eqn) for e in sub.eqns)


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
