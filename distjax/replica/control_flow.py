"""Control flow: equations that contain a merge are emitted in the global view.

Merges call their function and calls are inlined. Loops and branches become loops and
branches of the global view, whose bodies are split at merges in turn. A carry that any
iteration makes varying is stacked [R, ...] from the start, so the body is first traced for its
shapes until the localities no longer change (a fixpoint). `remat` stays `remat`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from distjax import inner_traces, jax_compat, user_lines
from distjax.context import frames
from distjax.errors import MergeError, message
from distjax.jaxprs import CALLS
from distjax.placement.topology import Topology
from distjax.replica.analysis import MERGE_NAME, Analysis
from distjax.replica.global_value import GlobalValue, stack_replicas


class Emitter(Protocol):
    """Emits jaxprs into the current trace; see `emit.JaxprEmitter`."""

    topology: Topology
    analysis: Analysis

    def emit(
        self, jaxpr: jax_compat.Jaxpr, consts: Sequence[Any], args: Sequence[GlobalValue]
    ) -> list[GlobalValue]:
        """Evaluates `jaxpr` on global values."""
        ...


def emit_equation(
    emitter: Emitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    """Evaluates one equation that is or contains a merge."""
    return _RULES.get(eqn.primitive.name, _emit_inlined)(emitter, eqn, ins)


def _emit_merge(
    emitter: Emitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    observer = frames.observer()
    with observer.on_merge(eqn) if observer is not None else contextlib.nullcontext():
        return eqn.params["merge"].emit(ins, emitter.topology)


def _emit_inlined(
    emitter: Emitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    if eqn.primitive.name not in CALLS:
        raise MergeError(_outside_text(emitter, eqn))
    return emitter.emit(*jax_compat.called_jaxpr(eqn), ins)


def _outside_text(emitter: Emitter, eqn: jax_compat.JaxprEqn) -> str:
    # Users know a `call_hi_primitive` by the name of the class behind it.
    name = type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name
    merge = next(m for sub in jax_compat.sub_jaxprs(eqn) for m in emitter.analysis.collectives(sub))
    return message(
        f"merge_call needs to stand outside of {name}",
        got=f"a merge_call inside of it, at {user_lines.source_line(merge)}",
        why=f"merge_call works in functions, loops and branches, but {name} runs its function by "
        "its own rules",
        fix="ctx.all_reduce('sum', x) in place of the merge_call, or the merge_call before or "
        f"after {name}",
    )


def _emit_remat(
    emitter: Emitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    """Binds the same primitive and parameters on the emitted jaxpr."""
    inner, inner_consts = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    outs: list[GlobalValue] = []

    def body(*arrays: jax.Array) -> list[Any]:
        args = [GlobalValue(a, i.varying) for a, i in zip(arrays, ins, strict=True)]
        outs[:] = emitter.emit(inner, inner_consts, args)
        return [o.array for o in outs]

    jaxpr, consts = inner_traces.trace_jaxpr(body, [jax_compat.aval_of(i.array) for i in ins])
    whole = jax_compat.new_jaxpr(
        jaxpr, (), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns
    )
    params = {**eqn.params, "jaxpr": whole}
    arrays = eqn.primitive.bind(*consts, *(jnp.asarray(i.array) for i in ins), **params)
    return [GlobalValue(a, o.varying) for a, o in zip(arrays, outs, strict=True)]


def _emit_scan(
    emitter: Emitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    consts, start, xs = jax_compat.split_scan_inputs(eqn, ins)
    inner, inner_consts = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    x_flags = [x.varying for x in xs]
    x_arrays = [jnp.moveaxis(x.array, 1, 0) if x.varying else jnp.asarray(x.array) for x in xs]

    def step(carry: Sequence[GlobalValue], x_slices: Sequence[Any]) -> list[GlobalValue]:
        x_values = _as_global_values(x_slices, x_flags)
        return emitter.emit(inner, inner_consts, [*consts, *carry, *x_values])

    slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in x_arrays]
    carry, flags, y_flags = _fixpoint(emitter, start, slices, step)

    def body(arrays: Sequence[Any], x_slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs, count = step(_as_global_values(arrays, flags), x_slices), len(flags)
        return _level(emitter, outs[:count], flags), _level(emitter, outs[count:], y_flags)

    final, ys = lax.scan(
        body,
        [c.array for c in carry],
        x_arrays,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    ys = [jnp.moveaxis(y, 0, 1) if f else y for y, f in zip(ys, y_flags, strict=True)]
    return _as_global_values(final, flags) + _as_global_values(ys, y_flags)


def _emit_while(
    emitter: Emitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    cond, cond_consts = jax_compat.open_jaxpr(eqn.params["cond_jaxpr"])
    inner, inner_consts = jax_compat.open_jaxpr(eqn.params["body_jaxpr"])
    cond_ins, body_ins, start = jax_compat.split_while_inputs(eqn, ins)

    def step(carry: Sequence[GlobalValue], _: Sequence[Any] = ()) -> list[GlobalValue]:
        predicate(carry)
        return emitter.emit(inner, inner_consts, [*body_ins, *carry])

    def predicate(carry: Sequence[GlobalValue]) -> Any:
        out = emitter.emit(cond, cond_consts, [*cond_ins, *carry])[0]
        if out.varying:
            emitter.analysis.require_uniform(eqn)
        return out.array

    carry, flags, _ = _fixpoint(emitter, start, [], step)
    final = lax.while_loop(
        lambda arrays: predicate(_as_global_values(arrays, flags)),
        lambda arrays: _level(
            emitter,
            emitter.emit(inner, inner_consts, [*body_ins, *_as_global_values(arrays, flags)]),
            flags,
        ),
        [c.array for c in carry],
    )
    return _as_global_values(final, flags)


def _emit_cond(
    emitter: Emitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    index, operands = ins[0], ins[1:]
    if index.varying:
        emitter.analysis.require_uniform(eqn)
    branches = [jax_compat.open_jaxpr(b) for b in eqn.params["branches"]]
    flags = [False] * len(eqn.outvars)

    def branch(jaxpr: jax_compat.Jaxpr, consts: Sequence[Any]) -> Callable[[], list[Any]]:
        return lambda: _level(emitter, emitter.emit(jaxpr, consts, operands), flags)

    for jaxpr, consts in branches:
        outs = _shapes_only(lambda j=jaxpr, c=consts: emitter.emit(j, c, operands))
        flags = _join(flags, [o.varying for o in outs])
    arrays = lax.switch(index.array, [branch(j, c) for j, c in branches])
    return _as_global_values(arrays, flags)


#: By primitive; any other equation is inlined.
_RULES = {
    MERGE_NAME: _emit_merge,
    "scan": _emit_scan,
    "while": _emit_while,
    "cond": _emit_cond,
    "remat2": _emit_remat,
}


def _fixpoint(
    emitter: Emitter,
    carry: Sequence[GlobalValue],
    slices: Sequence[Any],
    step: Callable[[Sequence[GlobalValue], Sequence[Any]], list[GlobalValue]],
) -> tuple[list[GlobalValue], list[bool], list[bool]]:
    """Returns (carry, its localities, output localities) at the fixpoint."""
    carry = [GlobalValue(jnp.asarray(c.array), c.varying) for c in carry]
    while True:
        flags = [c.varying for c in carry]
        avals = [jax_compat.aval_of(c.array) for c in carry]
        outs = _shapes_only(_with_localities(step, flags), [*avals, *slices])
        joined = _join(flags, [o.varying for o in outs[: len(carry)]])
        if joined == flags:
            return carry, flags, [o.varying for o in outs[len(carry) :]]
        carry = [
            GlobalValue(stack_replicas(c, emitter.topology), True) if f else c
            for c, f in zip(carry, joined, strict=True)
        ]


def _with_localities(
    step: Callable[[Sequence[GlobalValue], Sequence[Any]], list[GlobalValue]], flags: Sequence[bool]
) -> Callable[..., list[GlobalValue]]:
    count = len(flags)
    return lambda *arrays: step(_as_global_values(arrays[:count], flags), arrays[count:])


def _shapes_only(
    fn: Callable[..., list[GlobalValue]], avals: Sequence[Any] = ()
) -> list[GlobalValue]:
    found: list[GlobalValue] = []

    def trace(*arrays: jax.Array) -> list[Any]:
        found[:] = fn(*arrays)
        return [o.array for o in found]

    with frames.without_observer():
        inner_traces.trace_jaxpr(trace, avals)
    return found


def _join(a: Sequence[bool], b: Sequence[bool]) -> list[bool]:
    return [x or y for x, y in zip(a, b, strict=True)]


def _as_global_values(arrays: Sequence[Any], flags: Sequence[bool]) -> list[GlobalValue]:
    return [GlobalValue(a, f) for a, f in zip(arrays, flags, strict=True)]


def _level(emitter: Emitter, values: Sequence[GlobalValue], flags: Sequence[bool]) -> list[Any]:
    return [
        stack_replicas(v, emitter.topology) if f else v.array
        for v, f in zip(values, flags, strict=True)
    ]
