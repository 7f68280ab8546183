"""What each primitive does to the axis over the replicas: see `row_flow.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from distjax import jax_compat
from distjax.jax_compat import Jaxpr, JaxprEqn
from distjax.typing import PyTree

#: In place of an axis: the values of the replicas are in the array, but not along one axis.
MIXED = -1
#: The axis over the replicas; None: the array is one value.
Axis = int | None
Shape = tuple[int, ...]

#: Each element of the result depends on the elements of the operands at the same position.
ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg "
    "nextafter not or population_count pow real reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient "
    "sub tan tanh xor".split()
)


def shape_of(atom: PyTree) -> Shape:
    """Returns the shape of a tracer, a variable or a literal; () of what has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def axes_after(
    eqn: JaxprEqn, axes: Sequence[Axis], shapes: Sequence[Shape], count: int
) -> list[Axis]:
    """Returns the axis over the replicas of each result of an equation.

    Args:
      eqn: the equation, of a jaxpr or of a trace.
      axes: those of its operands.
      shapes: the shapes of its operands.
      count: R.
    """
    outs = [shape_of(v) for v in eqn.outvars]
    if all(axis is None for axis in axes):
        return [None] * len(outs)
    found = _found(eqn, axes, shapes, outs, count)
    return [axis if shape else None for axis, shape in zip(found, outs, strict=True)]


def _found(
    eqn: JaxprEqn, axes: Sequence[Axis], shapes: Sequence[Shape], outs: Sequence[Shape], count: int
) -> Sequence[Axis]:
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        return [axis_of_spec(spec, params["mesh"]) for spec in params["out_specs"]]
    if name == "optimization_barrier":
        return axes
    if name == "scan":
        return _scanned(eqn, axes, count)
    if any(key in params for key in ("jaxpr", "call_jaxpr")) and name != "while":
        jaxpr, _ = jax_compat.called_jaxpr(eqn)
        if len(jaxpr.invars) == len(axes) and len(jaxpr.outvars) == len(outs):
            return _inside(jaxpr, axes, count)
    rule = _RULES.get(name)
    if rule is None or MIXED in axes:
        return [MIXED] * len(outs)
    return [rule(params, axes, shapes, out, count) for out in outs]


def _inside(jaxpr: Jaxpr, axes: Sequence[Axis], count: int) -> list[Axis]:
    known: dict[Any, Axis] = dict(zip(jaxpr.invars, axes, strict=True))
    read = lambda atom: None if isinstance(atom, jax_compat.Literal) else known.get(atom)
    for eqn in jaxpr.eqns:
        outs = axes_after(eqn, [*map(read, eqn.invars)], [*map(shape_of, eqn.invars)], count)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [*map(read, jaxpr.outvars)]


def _scanned(eqn: JaxprEqn, axes: Sequence[Axis], count: int) -> list[Axis]:
    jaxpr, _ = jax_compat.open_jaxpr(eqn.params["jaxpr"])
    consts, carry, xs = jax_compat.split_scan_inputs(eqn, list(axes))
    each = [without([0], axis) for axis in xs]
    while True:  # ends: each turn changes a carry, from one value to rows or from rows to MIXED
        outs = _inside(jaxpr, [*consts, *carry, *each], count)
        after = [_joined([a, b]) for a, b in zip(carry, outs[: len(carry)], strict=True)]
        if after == carry:
            stacked = [a if a in (None, MIXED) else a + 1 for a in outs[len(carry) :]]
            return [*carry, *stacked]
        carry = after


def axis_of_spec(spec: Sequence[Any], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Axis:
    """Returns the axis that a spec splits along the first axis of `mesh`, that of the replicas."""
    replicas = mesh.axis_names[0]
    return next((i for i, n in enumerate(spec) if n == replicas or n == (replicas,)), None)


def _joined(axes: Sequence[Axis]) -> Axis:
    found = {axis for axis in axes if axis is not None}
    return None if not found else found.pop() if len(found) == 1 else MIXED


def without(dims: Sequence[int], axis: Axis) -> Axis:
    """Returns where an axis is once other axes are gone; None if it is one of them."""
    if axis is None or axis == MIXED:
        return axis
    return None if axis in dims else axis - sum(d < axis for d in dims)


_Params = Mapping[str, Any]
_Rule = Callable[[_Params, Sequence[Axis], Sequence[Shape], Shape, int], Axis]


def _unless_along(key: str) -> _Rule:
    """Returns the rule of an operation along one axis: it leaves the others alone."""

    def rule(params: _Params, axes: Sequence[Axis], *_: PyTree) -> Axis:
        axis = _joined(axes)
        return MIXED if axis == params[key] else axis

    return rule


def _elementwise(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    axis = _joined(axes)
    taken = [s for s, a in zip(shapes, axes, strict=True) if a is not None]
    is_kept = axis is not None and axis != MIXED and out[axis] == count
    return axis if is_kept and all(len(s) == len(out) for s in taken) else MIXED


def _broadcast(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    axis = params["broadcast_dimensions"][axes[0]]
    return axis if out[axis] == count else MIXED


def _reshape(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    axis: Any = axes[0]
    before = math.prod(shapes[0][:axis])
    fits = [j for j in range(len(out)) if out[j] == count and math.prod(out[:j]) == before]
    if params.get("dimensions") is not None or not fits:
        return MIXED
    return axis if axis in fits else fits[0]


def _taken(start: int, stop: int, stride: int, axis: int, count: int) -> Axis:
    if stop - start == count and stride == 1:
        return axis
    return None if stop - start == 1 else MIXED


def _slice(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    axis: Any = axes[0]
    start, stop = params["start_indices"][axis], params["limit_indices"][axis]
    return _taken(start, stop, (params["strides"] or (1,) * len(out))[axis], axis, count)


def _dynamic_slice(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    axis: Any = axes[0]
    return MIXED if axis is None else _taken(0, params["slice_sizes"][axis], 1, axis, count)


def _dynamic_update_slice(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    axis: Any = _joined(axes[:2])
    is_whole = axes[0] is not None or shapes[1][axis] == count
    return axis if axis != MIXED and is_whole and out[axis] == count else MIXED


def _stack(params: _Params, axes: Sequence[Axis], *_: PyTree) -> Axis:
    axis = _joined(axes)
    return axis if axis is None or axis == MIXED else axis + (params["axis"] <= axis)


def _gather(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    axis, dims = axes[0], params["dimension_numbers"]
    if axis is None or axes[1] is not None or axis in dims.operand_batching_dims:
        return MIXED
    gone = (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    if axis in gone:
        return None if len(out) == len(dims.offset_dims) else MIXED  # one row, or several
    kept: Any = without(gone, axis)
    return dims.offset_dims[kept] if params["slice_sizes"][axis] == count else MIXED


def _pad(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    axis: Any = axes[0]
    return axis if axis is not None and not any(params["padding_config"][axis]) else MIXED


def _dot(
    params: _Params, axes: Sequence[Axis], shapes: Sequence[Shape], out: Shape, count: int
) -> Axis:
    contracted, batch = params["dimension_numbers"]
    free = [
        [d for d in range(len(shape)) if d not in c and d not in b]
        for shape, c, b in zip(shapes, contracted, batch, strict=True)
    ]
    found: list[Axis] = []
    for side, axis in enumerate(axes):
        if axis is None:
            continue
        if axis in contracted[side]:
            found.append(None)
        elif axis in batch[side]:
            found.append(batch[side].index(axis))
        else:
            before = len(batch[0]) + (len(free[0]) if side else 0)
            found.append(before + free[side].index(axis))
    return found[0] if len(set(found)) == 1 else MIXED


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("pvary", *jax_compat.CONSTRAINTS), _elementwise),
    **dict.fromkeys(
        "cumsum cumprod cummax cummin cumlogsumexp".split(),
        _unless_along("axis"),
    ),
    **dict.fromkeys(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum "
        "reduce_xor".split(),
        lambda params, axes, *_: without(params["axes"], axes[0]),
    ),
    "broadcast_in_dim": _broadcast,
    "concatenate": _unless_along("dimension"),
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather,
    "pad": _pad,
    "reshape": _reshape,
    "rev": lambda params, axes, *_: axes[0],
    "slice": _slice,
    "sort": _unless_along("dimension"),
    "split": _unless_along("axis"),
    "stack": _stack,
    "unstack": lambda params, axes, *_: without([params["axis"]], axes[0]),
    "squeeze": lambda params, axes, *_: without(params["dimensions"], axes[0]),
    "transpose": lambda params, axes, *_: params["permutation"].index(axes[0]),
}
