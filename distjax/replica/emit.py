"""The emitter: turns a replica function's jaxpr into global-view code.

It walks the jaxpr once. Each run of equations without a merge is evaluated by one
`map_replicas`; merge functions run between these in the global view; control flow that
contains a merge is emitted by `control_flow`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from distjax import jax_compat, user_lines
from distjax.collectives.mapping import map_replicas
from distjax.context import frames
from distjax.errors import MergeError, message
from distjax.jax_compat import Literal
from distjax.placement.topology import Topology
from distjax.replica import control_flow
from distjax.replica.analysis import MERGE_NAME, Analysis, is_ref
from distjax.replica.global_value import GlobalValue
from distjax.replica.one_device import OneDevice
from distjax.staged_call import stage_call


class JaxprEmitter:
    """Emits the jaxprs of one strategy's replica functions into the current trace."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.analysis = Analysis(topology.axis_name)
        self._evaluate = _call
        if topology.mesh is None:
            self._evaluate = OneDevice(self.analysis, topology.num_replicas).evaluate

    def emit(
        self,
        jaxpr: jax_compat.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[GlobalValue],
        known: dict[Any, GlobalValue] | None = None,
    ) -> list[GlobalValue]:
        """Evaluates `jaxpr` on global values.

        Args:
          jaxpr: a replica-view jaxpr.
          consts: values of its constvars, equal on every replica.
          args: values of its invars.
          known: values of the jaxpr's variables that are given rather than computed.

        Returns:
          The values of its outputs.
        """
        env: dict[Any, GlobalValue] = dict(known or {})
        env.update((v, GlobalValue(c, False)) for v, c in zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        last_use = _last_uses(jaxpr)
        segment: list[Any] = []
        for index, eqn in enumerate(jaxpr.eqns):
            if eqn.outvars and all(v in env for v in eqn.outvars):
                continue
            if not holds_merge(eqn):
                segment.append(eqn)
                continue
            self._emit_segment(jaxpr, segment, env, last_use, index)
            segment = []
            outs = control_flow.emit_equation(self, eqn, [read_atom(env, v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        self._emit_segment(jaxpr, segment, env, last_use, len(jaxpr.eqns))
        return [read_atom(env, v) for v in jaxpr.outvars]

    def _emit_segment(
        self,
        jaxpr: jax_compat.Jaxpr,
        eqns: list[Any],
        env: dict[Any, GlobalValue],
        last_use: dict[Any, int],
        index: int,
    ) -> None:
        outs = [v for eqn in eqns for v in eqn.outvars if last_use.get(v, -1) >= index]
        if self.topology.mesh is not None:
            _require_no_ref(eqns, outs)
        eqns = jax_compat.live_equations(eqns, outs)
        made = {v for eqn in eqns for v in eqn.outvars}
        used = (v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
        ins = list(dict.fromkeys(v for v in used if v not in made))
        if not eqns:
            return
        varying = {v: env[v].varying for v in ins}
        self.analysis.run(eqns, varying)
        flags = [varying[v] for v in outs]
        part = jax_compat.new_jaxpr(jaxpr, (), ins, outs, eqns)
        observer = frames.observer()
        if observer is not None and self.topology.num_replicas > 1:
            observer.on_segment(part, [env[v].varying for v in ins], self.analysis)
        values = map_replicas(
            self.topology,
            lambda *local: self._evaluate(part, (), local),
            [env[v].array for v in ins],
            [env[v].varying for v in ins],
            flags,
        )
        values = [_as_traced(x, v) for x, v in zip(values, outs, strict=True)]
        env.update((v, GlobalValue(x, f)) for v, x, f in zip(outs, values, flags, strict=True))


def _call(jaxpr: jax_compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return stage_call(jaxpr, consts, args, jaxpr.debug_info.func_name)


def _require_no_ref(eqns: Sequence[jax_compat.JaxprEqn], outs: Sequence[jax_compat.Var]) -> None:
    """Raises a MergeError if a merge stands between the making and a use of a `jax.new_ref`."""
    kept = {v for v in outs if is_ref(v)}
    made = next((eqn for eqn in eqns if kept.intersection(eqn.outvars)), None)
    if made is None:
        return
    raise MergeError(
        message(
            "a merge_call needs to stand before or after all uses of a jax.new_ref",
            got=f"a ref that is used before and after one, made at {user_lines.source_line(made)}",
            why="on devices the parts of a step before and after a merge are mapped over the "
            "replicas one by one, and a ref cannot pass from one to the next",
            fix="value = ref[...] before the merge_call, and ref = jax.new_ref(value) after it; or "
            "ctx.all_reduce('sum', x) in place of the merge_call",
        )
    )


def _as_traced(value: jax.Array, variable: jax_compat.Var) -> jax.Array:
    """Returns `value`, weakly typed only where it was so in the trace.

    `vmap` computes the psum of an equal value as a multiple of it, which stays weakly typed (JAX
    0.10 to 0.12): a sum of ints would then take the dtype of an int8 that it meets.
    """
    traced = variable.aval
    if not isinstance(traced, jax_compat.ShapedArray) or traced.weak_type:
        return value
    is_weak = jax_compat.aval_of(value).weak_type
    return lax.convert_element_type(value, value.dtype) if is_weak else value


def read_atom(
    env: dict[Any, GlobalValue], atom: jax_compat.Var | jax_compat.Literal
) -> GlobalValue:
    """Returns the value of a variable or literal."""
    return GlobalValue(atom.val, False) if isinstance(atom, Literal) else env[atom]


def holds_merge(eqn: jax_compat.JaxprEqn) -> bool:
    """Returns whether an equation is a merge or contains one, at any depth."""
    if eqn.primitive.name == MERGE_NAME:
        return True
    return any(holds_merge(e) for sub in jax_compat.sub_jaxprs(eqn) for e in sub.eqns)


def _last_uses(jaxpr: jax_compat.Jaxpr) -> dict[Any, int]:
    uses: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        uses.update((v, index) for v in eqn.invars if not isinstance(v, Literal))
    uses.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if not isinstance(v, Literal))
    return uses
