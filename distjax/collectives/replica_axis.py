"""Runs a strategy's code in a call that renames the replica axis.

`dj.pmap(axis_name="batch")` renames the axis for one call: the user's code is traced and mapped
under that name. Variable layouts, which may be custom, use their strategy's axis name, so their
per-replica code is traced separately and evaluated with the name replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from distjax import inner_traces, jax_compat
from distjax.context import frames
from distjax.jax_compat import Jaxpr, JaxprEqn
from distjax.placement.topology import Topology


def is_bound_axis(name: str) -> bool:
    """Returns whether an axis of this name is bound here."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def call_on_replica(fn: Callable[..., Any], topology: Topology, *arrays: jax.Array) -> Any:
    """Returns the array ``fn(*arrays)``, where ``fn`` uses the axis name of `topology`."""
    axis_name = frames.replica_axis(topology)
    if axis_name == topology.axis_name:
        return fn(*arrays)
    axis_env = [(topology.axis_name, topology.num_replicas)]
    avals = [jax_compat.aval_of(x) for x in arrays]
    jaxpr, consts = inner_traces.trace_jaxpr(lambda *local: [fn(*local)], avals, axis_env)
    names = {topology.axis_name: axis_name}
    return _evaluate(jaxpr, consts, arrays, names)[0]


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], names: dict[str, str]
) -> list[Any]:
    """Evaluates a jaxpr with axis names replaced in its equations, also inside `jit`."""

    def bind(eqn: JaxprEqn, ins: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "jit":
            return _evaluate(*jax_compat.called_jaxpr(eqn), ins, names)
        params = {key: _rename_axes(value, names) for key, value in eqn.params.items()}
        return jax_compat.bind_equation(eqn, ins, params)

    return jax_compat.eval_jaxpr(jaxpr, consts, args, bind)


def _rename_axes(value: object, names: dict[str, str]) -> Any:
    if isinstance(value, tuple):
        return tuple(names.get(x, x) if isinstance(x, str) else x for x in value)
    return names.get(value, value) if isinstance(value, str) else value
