"""Lifting: an equation that holds a merge runs in the global view.

A merge calls its function. Calls are inlined. Loops and branches become loops
and branches of the global view whose bodies are cut in turn, with the
localities of their carries at a fixpoint. `remat` stays `remat`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from distjax import jax_compat
from distjax.context import frames
from distjax.errors import MergeError, explain
from distjax.replica.analysis import CALLS, MERGE_NAME, join
from distjax.replica.located import Located, stacked

if TYPE_CHECKING:
    from distjax.replica.cut import Cutter

#: What gives the same when its jaxpr is evaluated in its place.
_INLINED = CALLS | {"composite", "compute_on"}


def emit_equation(cutter: Cutter, eqn: Any, ins: list[Located]) -> list[Located]:
    """Evaluates one equation that is or holds a merge."""
    name = eqn.primitive.name
    if name == MERGE_NAME:
        observer = frames.observer()
        with observer.saw_merge(eqn) if observer is not None else contextlib.nullcontext():
            return eqn.params["merge"].emit(ins, cutter.topology)
    if name == "scan":
        return _emit_scan(cutter, eqn, ins)
    if name == "while":
        return _emit_while(cutter, eqn, ins)
    if name == "cond":
        return _emit_cond(cutter, eqn, ins)
    if name.startswith("remat") or name == "checkpoint":
        return _emit_remat(cutter, eqn, ins)
    return _emit_inlined(cutter, eqn, ins)


def _emit_inlined(cutter: Cutter, eqn: Any, ins: list[Located]) -> list[Located]:
    if eqn.primitive.name not in _INLINED:
        raise MergeError(_refused_text(cutter, eqn))
    key = "call_jaxpr" if "call_jaxpr" in eqn.params else "jaxpr"
    jaxpr, consts = jax_compat.open_jaxpr(eqn.params[key])
    return cutter.emit(jaxpr, consts, ins)


def _refused_text(cutter: Cutter, eqn: Any) -> str:
    # A `call_hi_primitive` is known to users by the class of what it calls.
    name = type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name
    merge = next(m for sub in jax_compat.sub_jaxprs(eqn) for m in cutter.analysis.collectives(sub))
    return explain(
        f"merge_call needs to stand outside of {name}",
        got=f"a merge_call inside of it, at {jax_compat.source_line(merge)}",
        why=f"replicas pause in functions, loops and branches, but {name} runs its function by "
        "rules of its own",
        fix="ctx.all_reduce('sum', x) in place of the merge_call, or the merge_call before or "
        f"after {name}",
    )


def _emit_remat(cutter: Cutter, eqn: Any, ins: list[Located]) -> list[Located]:
    """Binds the same primitive, with its parameters, on the cut jaxpr."""
    inner, inner_consts = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    outs: list[Located] = []

    def body(*arrays: Any) -> list[Any]:
        args = [Located(a, i.differs) for a, i in zip(arrays, ins, strict=True)]
        outs[:] = cutter.emit(inner, inner_consts, args)
        return [o.array for o in outs]

    jaxpr, consts = jax_compat.trace_jaxpr(body, [jax_compat.aval_of(i.array) for i in ins])
    whole = jax_compat.make_jaxpr(
        jaxpr, (), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns
    )
    params = {**eqn.params, "jaxpr": whole}
    arrays = eqn.primitive.bind(*consts, *(jnp.asarray(i.array) for i in ins), **params)
    return [Located(a, o.differs) for a, o in zip(arrays, outs, strict=True)]


def _emit_scan(cutter: Cutter, eqn: Any, ins: list[Located]) -> list[Located]:
    num_consts, num_carry = jax_compat.scan_sizes(eqn)
    inner, inner_consts = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    consts, carry = ins[:num_consts], ins[num_consts : num_consts + num_carry]
    xs = ins[num_consts + num_carry :]
    x_flags = [x.differs for x in xs]
    x_arrays = [jnp.moveaxis(x.array, 1, 0) if x.differs else jnp.asarray(x.array) for x in xs]

    def step(carry: Sequence[Located], x_slices: Sequence[Any]) -> list[Located]:
        located = [Located(a, f) for a, f in zip(x_slices, x_flags, strict=True)]
        return cutter.emit(inner, inner_consts, [*consts, *carry, *located])

    slices = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in x_arrays]
    carry, flags, y_flags = _fixpoint(cutter, carry, slices, step)

    def body(arrays: Sequence[Any], x_slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        outs = step(_locate(arrays, flags), x_slices)
        return _level(cutter, outs[:num_carry], flags), _level(cutter, outs[num_carry:], y_flags)

    final, ys = lax.scan(
        body,
        [c.array for c in carry],
        x_arrays,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    ys = [jnp.moveaxis(y, 0, 1) if f else y for y, f in zip(ys, y_flags, strict=True)]
    return _locate(final, flags) + _locate(ys, y_flags)


def _emit_while(cutter: Cutter, eqn: Any, ins: list[Located]) -> list[Located]:
    cond, cond_consts = jax_compat.open_jaxpr(eqn.params["cond_jaxpr"])
    inner, inner_consts = jax_compat.open_jaxpr(eqn.params["body_jaxpr"])
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_ins, body_ins = ins[:num_cond], ins[num_cond : num_cond + num_body]

    def step(carry: Sequence[Located], _: Sequence[Any] = ()) -> list[Located]:
        predicate(carry)
        return cutter.emit(inner, inner_consts, [*body_ins, *carry])

    def predicate(carry: Sequence[Located]) -> Any:
        out = cutter.emit(cond, cond_consts, [*cond_ins, *carry])[0]
        if out.differs:
            cutter.analysis.require_uniform(eqn, "while_loop")
        return out.array

    carry, flags, _ = _fixpoint(cutter, ins[num_cond + num_body :], [], step)
    final = lax.while_loop(
        lambda arrays: predicate(_locate(arrays, flags)),
        lambda arrays: _level(
            cutter, cutter.emit(inner, inner_consts, [*body_ins, *_locate(arrays, flags)]), flags
        ),
        [c.array for c in carry],
    )
    return _locate(final, flags)


def _emit_cond(cutter: Cutter, eqn: Any, ins: list[Located]) -> list[Located]:
    index, operands = ins[0], ins[1:]
    if index.differs:
        cutter.analysis.require_uniform(eqn, "cond")
    branches = [jax_compat.open_jaxpr(b) for b in eqn.params["branches"]]
    flags = [False] * len(eqn.outvars)

    def branch(jaxpr: Any, consts: Sequence[Any]) -> Callable[[], list[Any]]:
        return lambda: _level(cutter, cutter.emit(jaxpr, consts, operands), flags)

    for jaxpr, consts in branches:
        outs = _shapes_only(lambda j=jaxpr, c=consts: cutter.emit(j, c, operands))
        flags = join(flags, [o.differs for o in outs])
    arrays = lax.switch(index.array, [branch(j, c) for j, c in branches])
    return _locate(arrays, flags)


def _fixpoint(
    cutter: Cutter,
    carry: Sequence[Located],
    slices: Sequence[Any],
    step: Callable[[Sequence[Located], Sequence[Any]], list[Located]],
) -> tuple[list[Located], list[bool], list[bool]]:
    """Returns the carry at its least stable locality, and localities of all outputs."""
    carry = [Located(jnp.asarray(c.array), c.differs) for c in carry]
    while True:
        flags = [c.differs for c in carry]
        avals = [jax_compat.aval_of(c.array) for c in carry]
        outs = _shapes_only(_with_localities(step, flags), [*avals, *slices])
        joined = join(flags, [o.differs for o in outs[: len(carry)]])
        if joined == flags:
            return carry, flags, [o.differs for o in outs[len(carry) :]]
        carry = [
            Located(stacked(c, cutter.topology), True) if f else c
            for c, f in zip(carry, joined, strict=True)
        ]


def _with_localities(
    step: Callable[[Sequence[Located], Sequence[Any]], list[Located]], flags: Sequence[bool]
) -> Callable[..., list[Located]]:
    count = len(flags)
    return lambda *arrays: step(_locate(arrays[:count], flags), arrays[count:])


def _shapes_only(fn: Callable[..., list[Located]], avals: Sequence[Any] = ()) -> list[Located]:
    found: list[Located] = []

    def traced(*arrays: Any) -> list[Any]:
        found[:] = fn(*arrays)
        return [o.array for o in found]

    with frames.unobserved():
        jax_compat.trace_jaxpr(traced, avals)
    return found


def _locate(arrays: Sequence[Any], flags: Sequence[bool]) -> list[Located]:
    return [Located(a, f) for a, f in zip(arrays, flags, strict=True)]


def _level(cutter: Cutter, values: Sequence[Located], flags: Sequence[bool]) -> list[Any]:
    return [
        stacked(v, cutter.topology) if f else v.array for v, f in zip(values, flags, strict=True)
    ]
