"""The emitter: turns a replica function's jaxpr into global-view code.

It walks the jaxpr once. Each run of equations without a merge is evaluated by one `map_replicas`;
merge functions run between these in the global view.

Equations that contain a merge are emitted in the global view. Merges call their function and calls
are inlined. Loops and branches become loops and branches of the global view, whose bodies are split
at merges in turn. A carry that any iteration makes varying is stacked [R, ...] from the start, so
the body is first traced for its shapes until the localities no longer change (a fixpoint). `remat`
stays `remat`.

On one device all replicas run under `vmap`. Its rules do not support groups of replicas or partial
permutations, give an `all_to_all` of an equal value the wrong shape, let a `custom_vmap` mistake
the replica axis for a user's, and cannot map some primitives. Such equations are evaluated by
`OneDevice` from other operations of the same meaning; all others are left to JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distjax._src import hooks, jax_compat, traces, user_lines
from distjax._src.collectives.mapping import map_replicas
from distjax._src.jax_compat import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from distjax._src.jaxprs import CALLS, evaluate_inside
from distjax._src.placement import Topology
from distjax._src.replica.analysis import MERGE_NAME, Analysis, holds_merge, is_ref
from distjax._src.replica.global_value import GlobalValue, stack_replicas
from distjax._src.traces import stage_call, struct
from distjax._src.typing import ArrayLike
from distjax.errors import MergeError, message


class JaxprEmitter:
    """Emits the jaxprs of one strategy's replica functions into the current trace."""

    def __init__(self, topology: Topology):
        self.topology = topology
        self.analysis = Analysis(topology.axis_name)
        self._evaluate = _call
        if not topology.maps_devices:
            self._evaluate = OneDevice(self.analysis, topology.num_replicas).evaluate

    def emit(
        self,
        jaxpr: jax_compat.Jaxpr,
        consts: Sequence[Any],
        args: Sequence[GlobalValue],
        known: dict[Any, GlobalValue] | None = None,
    ) -> list[GlobalValue]:
        """Returns the outputs of a replica-view jaxpr, evaluated on global values.

        The constants are equal on every replica; `known` are values of its variables that are given
        rather than computed.
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
            outs = self.emit_merging(eqn, [read_atom(env, v) for v in eqn.invars])
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
        eqns = self.needed(eqns, outs)
        made = {v for eqn in eqns for v in eqn.outvars}
        used = (v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal))
        ins = list(dict.fromkeys(v for v in used if v not in made))
        if not eqns:
            return
        varying = {v: env[v].varying for v in ins}
        self.analysis.run(eqns, varying)
        flags = [varying[v] for v in outs]
        part = jax_compat.new_jaxpr(jaxpr, (), ins, outs, eqns)
        if self.topology.num_replicas > 1:
            hooks.tell(hooks.on_segment, part, [env[v].varying for v in ins], self.topology)
        values = self.map_segment(part, [env[v] for v in ins], flags)
        values = [_as_traced(x, v) for x, v in zip(values, outs, strict=True)]
        env.update((v, GlobalValue(x, f)) for v, x, f in zip(outs, values, flags, strict=True))

    def needed(self, eqns: list[JaxprEqn], outs: Sequence[Any]) -> list[JaxprEqn]:
        """Returns the equations that are evaluated: those that results, or effects, need."""
        return jax_compat.live_equations(eqns, outs)

    def map_segment(
        self, part: Jaxpr, ins: Sequence[GlobalValue], flags: Sequence[bool]
    ) -> list[Any]:
        """Returns the global results of code without merges; `flags` says which vary."""
        run = lambda *local: self._evaluate(part, (), local)
        arrays, varying = [x.array for x in ins], [x.varying for x in ins]
        return map_replicas(self.topology, run, arrays, varying, flags)

    def emit_merging(self, eqn: JaxprEqn, ins: list[GlobalValue]) -> list[GlobalValue]:
        """Evaluates one equation that is or contains a merge."""
        return _RULES.get(eqn.primitive.name, _emit_inlined)(self, eqn, ins)


def _call(jaxpr: jax_compat.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    return stage_call(jaxpr, consts, args, jaxpr.debug_info.func_name)


def _require_no_ref(eqns: Sequence[jax_compat.JaxprEqn], outs: Sequence[jax_compat.Var]) -> None:
    """Raises a MergeError if a merge stands between the making and a use of a `jax.new_ref`."""
    kept = {v for v in outs if is_ref(v)}
    made = next((eqn for eqn in eqns if kept.intersection(eqn.outvars)), None)
    if made is None:
        return
    raise MergeError(
        "a merge_call needs to come before or after all uses of a jax.new_ref",
        got=f"a ref that is used before and after one, made at {user_lines.source_line(made)}",
        why="on devices the parts of a step before and after a merge are mapped over the "
        "replicas one by one, and a ref cannot pass from one to the next",
        fix="value = ref[...] before the merge_call, and ref = jax.new_ref(value) after it; or "
        "ctx.all_reduce('sum', x) in place of the merge_call",
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


def _last_uses(jaxpr: jax_compat.Jaxpr) -> dict[Any, int]:
    uses: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        uses.update((v, index) for v in eqn.invars if not isinstance(v, Literal))
    uses.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if not isinstance(v, Literal))
    return uses


# -- merges in calls, loops and branches ----------------------------------------


def _emit_merge(
    emitter: JaxprEmitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    with hooks.inside(hooks.in_merge, eqn):
        return eqn.params["merge"].emit(ins, emitter.topology)


def _emit_inlined(
    emitter: JaxprEmitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    if eqn.primitive.name not in CALLS:
        raise MergeError(_outside_text(emitter, eqn))
    return emitter.emit(*jax_compat.called_jaxpr(eqn), ins)


def _outside_text(emitter: JaxprEmitter, eqn: jax_compat.JaxprEqn) -> str:
    # Users know a `call_hi_primitive` by the name of the class behind it.
    name = type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name
    merge = next(m for sub in jax_compat.sub_jaxprs(eqn) for m in emitter.analysis.collectives(sub))
    return message(
        f"merge_call needs to be outside of {name}",
        got=f"a merge_call inside of it, at {user_lines.source_line(merge)}",
        why=f"merge_call works in functions, loops and branches, but {name} runs its function by "
        "its own rules",
        fix="ctx.all_reduce('sum', x) in place of the merge_call, or the merge_call before or "
        f"after {name}",
    )


def _emit_remat(
    emitter: JaxprEmitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    """Binds the same primitive and parameters on the emitted jaxpr."""
    inner, inner_consts = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    outs: list[GlobalValue] = []

    def body(*arrays: jax.Array) -> list[Any]:
        args = [GlobalValue(a, i.varying) for a, i in zip(arrays, ins, strict=True)]
        outs[:] = emitter.emit(inner, inner_consts, args)
        return [o.array for o in outs]

    jaxpr, consts = traces.trace_jaxpr(body, [jax_compat.aval_of(i.array) for i in ins])
    whole = jax_compat.new_jaxpr(
        jaxpr, (), [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns
    )
    params = {**eqn.params, "jaxpr": whole}
    arrays = eqn.primitive.bind(*consts, *(jnp.asarray(i.array) for i in ins), **params)
    return [GlobalValue(a, o.varying) for a, o in zip(arrays, outs, strict=True)]


def _emit_scan(
    emitter: JaxprEmitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
) -> list[GlobalValue]:
    consts, start, xs = jax_compat.split_scan_inputs(eqn, ins)
    inner, inner_consts = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    x_flags = [x.varying for x in xs]
    x_arrays = [jnp.moveaxis(x.array, 1, 0) if x.varying else jnp.asarray(x.array) for x in xs]

    def step(carry: Sequence[GlobalValue], x_slices: Sequence[Any]) -> list[GlobalValue]:
        x_values = _as_global_values(x_slices, x_flags)
        return emitter.emit(inner, inner_consts, [*consts, *carry, *x_values])

    slices = [struct(x.shape[1:], x.dtype) for x in x_arrays]
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
    emitter: JaxprEmitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
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
    emitter: JaxprEmitter, eqn: jax_compat.JaxprEqn, ins: list[GlobalValue]
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
        flags = _join_flags(flags, [o.varying for o in outs])
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
    emitter: JaxprEmitter,
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
        joined = _join_flags(flags, [o.varying for o in outs[: len(carry)]])
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

    traces.trace_jaxpr(trace, avals, only_shapes=True)
    return found


def _join_flags(a: Sequence[bool], b: Sequence[bool]) -> list[bool]:
    return [x or y for x, y in zip(a, b, strict=True)]


def _as_global_values(arrays: Sequence[Any], flags: Sequence[bool]) -> list[GlobalValue]:
    return [GlobalValue(a, f) for a, f in zip(arrays, flags, strict=True)]


def _level(
    emitter: JaxprEmitter, values: Sequence[GlobalValue], flags: Sequence[bool]
) -> list[Any]:
    return [
        stack_replicas(v, emitter.topology) if f else v.array
        for v, f in zip(values, flags, strict=True)
    ]


# -- replicas that share a device -----------------------------------------------


#: Primitives that are replaced by the evaluation of their inner jaxpr.
_INLINED = frozenset("jit closed_call eval_jaxpr composite custom_vmap_call".split())
#: Primitives whose `vmap` rule requires all operands to be mapped.
_ALL_MAPPED = frozenset("ragged_dot ragged_dot_general".split())


class OneDevice:
    """Evaluates jaxprs of replica functions inside `vmap`."""

    def __init__(self, analysis: Analysis, num_replicas: int):
        self._analysis, self.num_replicas = analysis, num_replicas
        self.axis_name = analysis.axis_name

    def evaluate(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Returns the outputs of `jaxpr` as separate devices would compute them."""
        if not any(map(self._is_special, jaxpr.eqns)):
            return jax_compat.eval_jaxpr(jaxpr, consts, args)
        return jax_compat.eval_jaxpr(jaxpr, consts, args, self._equation)

    def _is_special(self, eqn: JaxprEqn) -> bool:
        name, params = eqn.primitive.name, eqn.params
        if name in _ALL_MAPPED or name in ("composite", "custom_vmap_call"):
            return True
        if name == "pure_callback":
            return params.get("vmap_method") is None
        if name == "io_callback":
            return bool(params.get("ordered"))
        if self._analysis.over_replicas(eqn):
            is_partial = name == "ppermute" and len(params["perm"]) != self.num_replicas
            return is_partial or name == "all_to_all" or bool(params.get("axis_index_groups"))
        return any(self._is_special(e) for sub in jax_compat.sub_jaxprs(eqn) for e in sub.eqns)

    def _equation(self, eqn: JaxprEqn, ins: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if not self._is_special(eqn):
            return jax_compat.bind_equation(eqn, ins)
        if self._analysis.over_replicas(eqn):
            return [self._collective(name, ins[0], params)]
        if name in _INLINED:
            return self.evaluate(*jax_compat.called_jaxpr(eqn), ins)
        if name == "remat2":
            options = {key: params[key] for key in ("prevent_cse", "policy")}
            return jax.checkpoint(self._as_function(params["jaxpr"]), **options)(*ins)
        inside = evaluate_inside(eqn, ins, self.evaluate)
        if inside is not None:
            return inside
        if name in ("custom_jvp_call", "custom_vjp_call"):
            evaluate = jax.custom_jvp(self._as_function(params["call_jaxpr"]))
            evaluate.defjvp(_refuse_derivative)
            return evaluate(*ins)
        if name in _ALL_MAPPED:
            return jax_compat.bind_equation(eqn, list(map(self._spread, ins)))
        if "callback" in name:
            return self._one_by_one(eqn, ins)
        return jax_compat.bind_equation(eqn, ins)  # JAX reports what it cannot map

    def _one_by_one(self, eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
        """Returns the results of an equation that runs for one replica at a time."""
        rows = [lax.all_gather(x, self.axis_name) for x in ins]
        run = lambda row: list(jax_compat.bind_equation(eqn, row[1:]))
        outs = lax.map(run, [jnp.arange(self.num_replicas), *rows])
        return [self.own_row(out) for out in outs]

    def own_row(self, rows: ArrayLike) -> jax.Array:
        """Returns this replica's row of an array or table shared by all."""
        return jnp.asarray(rows)[lax.axis_index(self.axis_name)]

    def _spread(self, x: ArrayLike) -> jax.Array:
        """Returns `x` as a mapped value, even if it is equal on all replicas."""
        is_any = jnp.broadcast_to(lax.axis_index(self.axis_name) >= 0, jnp.shape(x))
        return lax.select(is_any, jnp.asarray(x), jnp.asarray(x))

    # -- collectives -----------------------------------------------------------

    def _collective(self, name: str, x: ArrayLike, params: Mapping[str, Any]) -> jax.Array:
        groups = params.get("axis_index_groups")
        if name == "ppermute":
            return self._permute(x, params["perm"])
        if not groups:  # `vmap` handles an all_to_all of mapped values correctly
            return lax.all_to_all_p.bind(self._spread(x), **params)
        group = _Group(self, x, groups)
        if name == "all_gather":
            return _join(group.rows, params["all_gather_dimension"], params["tiled"])
        if name == "reduce_scatter":
            total, axis = group.reduce(jnp.sum, 0), params["scatter_dimension"]
            return group.part(total, axis, params["tiled"])
        if name == "all_to_all":
            axis = params["split_axis"]  # the equation is in tiled form either way
            parts = jax.vmap(lambda row: group.part(row, axis, tiled=True))(group.rows)
            return _join(parts, params["concat_axis"], tiled=True)
        reduce = {"pmax": jnp.max, "pmin": jnp.min}.get(name)
        return group.reduce(jnp.sum, 0) if reduce is None else group.reduce(reduce, None)

    def _permute(self, x: ArrayLike, perm: Sequence[tuple[int, int]]) -> jax.Array:
        source, has_source = np.zeros(self.num_replicas, int), np.zeros(self.num_replicas, bool)
        for sender, receiver in perm:
            source[receiver], has_source[receiver] = sender, True
        row = lax.all_gather(x, self.axis_name)[self.own_row(source)]
        return jnp.where(self.own_row(has_source), row, jnp.zeros_like(row))

    def _as_function(self, closed: ClosedJaxpr) -> Callable[..., list[Any]]:
        """Returns a function that evaluates the code as separate devices would."""
        jaxpr, consts = jax_compat.open_jaxpr(closed)
        return lambda *args: self.evaluate(jaxpr, consts, args)


class _Group:
    """The values of the replicas in this one's group: `rows` [k, ...], k those of the largest."""

    def __init__(self, device: OneDevice, x: ArrayLike, groups: Sequence[Sequence[int]]):
        self.size = max(map(len, groups))
        members = np.zeros((device.num_replicas, self.size), int)
        position, sizes = np.zeros(device.num_replicas, int), np.zeros(device.num_replicas, int)
        for group in groups:
            for place, replica in enumerate(group):
                members[replica] = [*group, *[group[0]] * (self.size - len(group))]
                position[replica], sizes[replica] = place, len(group)
        self.rows = lax.all_gather(x, device.axis_name)[device.own_row(members)]
        self._position, self._num_members = device.own_row(position), device.own_row(sizes)

    def reduce(self, reduce: Callable[..., Any], missing: int | None) -> jax.Array:
        """Reduces the rows; `missing` pads groups smaller than the largest."""
        rows = self.rows
        if missing is not None:
            is_row = jnp.arange(self.size) < self._num_members
            is_row = is_row.reshape(-1, *[1] * (rows.ndim - 1))
            rows = jnp.where(is_row, rows, jnp.asarray(missing, rows.dtype))
        return reduce(rows, axis=0).astype(rows.dtype)

    def part(self, value: jax.Array, axis: int, tiled: bool) -> jax.Array:
        """Returns the part of `value` for this replica's position in the group."""
        if not tiled:
            return lax.dynamic_index_in_dim(value, self._position, axis, keepdims=False)
        size = value.shape[axis] // self.size
        return lax.dynamic_slice_in_dim(value, self._position * size, size, axis)


def _join(rows: jax.Array, axis: int, tiled: bool) -> jax.Array:
    """Moves the first axis of rows [k, ...] to `axis`, merging it there if tiled."""
    moved = jnp.moveaxis(rows, 0, axis)
    if not tiled:
        return moved
    shape = moved.shape
    return moved.reshape(*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])


def _refuse_derivative(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
    raise NotImplementedError(
        message(
            "a derivative around run, on replicas that share a device, needs functions without a "
            "custom derivative rule around grouped collectives or partial permutations",
            got="one with such a rule",
            why="the rule is for jax.vmap, which knows no groups of replicas",
            fix="jax.grad inside the replica function; or a MirroredStrategy",
        )
    )
