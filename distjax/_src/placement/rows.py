"""Which axis of an array runs over the replicas, for arrays that are not a `PerReplica` any more.

To JAX a `PerReplica` is a tree node with one leaf, the array [R, ...]. Tree code takes that leaf
out and computes with it, and nothing in the type of what comes out says that it holds R values.
In a trace the equations say so: they are followed back, from the array to the leaves of
`PerReplica`s, with a rule for each primitive. What no rule knows is `MIXED`: such an array is
refused where one value for all replicas is needed. An array outside of traces has no equations:
its layout on the devices tells, and where all replicas share one device only what was noted.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from distjax._src import jax_compat
from distjax._src.jax_compat import JaxprEqn
from distjax._src.jaxprs import Flow
from distjax._src.placement.topology import Topology
from distjax._src.traces import is_struct
from distjax._src.typing import PyTree
from distjax.errors import LocalityError, describe_value

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

# -- arrays and tracers -------------------------------------------------------

#: By `id`, for as long as they live: arrays and tracers, R, and their axis over the replicas.
_noted: dict[int, tuple[weakref.ref[Any], int, Axis]] = {}


def note(value: PyTree, num_replicas: int, axis: Axis) -> None:
    """Remembers the axis of an array over the replicas; None: that it is one value."""
    key = id(value)
    reference = weakref.ref(value, lambda _: _noted.pop(key, None))
    _noted[key] = reference, num_replicas, axis


#: By `id`, for as long as they live: arrays that are the replicas' rows of a batch.
_batches: dict[int, weakref.ref[Any]] = {}


def note_batch(array: jax.Array) -> None:
    """Remembers that an array holds the rows that each replica has of a batch."""
    key = id(array)
    _batches[key] = weakref.ref(array, lambda _: _batches.pop(key, None))


def is_batch(array: PyTree) -> bool:
    """Returns whether an array holds the replicas' rows of a batch, as far as is known."""
    reference = _batches.get(id(array))
    return reference is not None and reference() is array


def note_one_value(value: PyTree, num_replicas: int) -> Any:
    """Returns `value`, remembered as one value for all replicas, whatever it is computed from."""
    if isinstance(value, jax_compat.Tracer):
        note(value, num_replicas, None)
    return value


def stand_in(tracer: PyTree, given: PyTree) -> None:
    """Remembers what is known of the array for which a tracer stands in a program of distjax."""
    if not isinstance(given, jax.Array) or isinstance(given, jax_compat.Tracer):
        return
    reference, num_replicas, axis = _noted.get(id(given), (lambda: None, 0, None))
    if reference() is given:
        note(tracer, num_replicas, axis)
    elif isinstance(sharding := given.sharding, NamedSharding) and given.ndim:
        name = sharding.mesh.axis_names[0]  # the replicas', in meshes of distjax
        axis = _axis_of_spec(tuple(sharding.spec), sharding.mesh)
        num_replicas = sharding.mesh.shape[name]
        if num_replicas > 1 and axis is not None:  # of R elements, or of the replicas' rows
            note(tracer, num_replicas, axis)


def holds_noted(tree: PyTree) -> bool:
    """Returns whether anything is remembered of any leaf."""
    return bool(_noted) and not _noted.keys().isdisjoint(map(id, jax.tree.leaves(tree)))


def _recall(value: object, num_replicas: int) -> tuple[bool, Axis]:
    reference, noted_for, axis = _noted.get(id(value), (lambda: None, 0, None))
    is_known = reference() is value and noted_for == num_replicas
    return is_known, axis


def replica_axis(value: PyTree, topology: Topology) -> Axis:
    """Returns the axis of an array or tracer over the replicas; None for one value, or `MIXED`."""
    num_replicas = topology.num_replicas
    pending, passed = [value], set[int]()
    while pending:  # without recursion: a trace may be long
        last = pending[-1]
        if _recall(last, num_replicas)[0] or not isinstance(last, jax_compat.Tracer):
            pending.pop()
            continue
        before = [x for x in _made_from(last) if not _recall(x, num_replicas)[0]]
        if before and id(last) not in passed:
            passed.add(id(last))
            pending += [x for x in before if isinstance(x, jax_compat.Tracer)]
        else:
            note(last, num_replicas, _axis_of_tracer(last, topology))
            pending.pop()
    return _known_axis(value, topology)


def _known_axis(value: PyTree, topology: Topology) -> Axis:
    is_known, axis = _recall(value, topology.num_replicas)
    if is_known or isinstance(value, jax_compat.Tracer):
        return axis
    return axis_of_layout(value, topology) if isinstance(value, jax.Array) else None


def _made_from(value: PyTree) -> Sequence[Any]:
    eqn = jax_compat.equation_of(value)
    if eqn is not None:
        return eqn.in_tracers
    behind = _behind(value)
    return [] if behind is None else [behind]


def _behind(tracer: PyTree) -> Any:
    """Returns what a tracer without an equation stands for; None: an argument, or no tracer.

    That of a captured value, of `vmap` or of a derivative; the names are those of JAX 0.10 to 0.12.
    """
    if not isinstance(tracer, jax_compat.Tracer):
        return None
    if hasattr(tracer, "get_const"):
        const = tracer.get_const()
        return const if isinstance(const, jax.Array) else None
    return tracer.val if hasattr(tracer, "batch_dim") else getattr(tracer, "primal", None)


def _axis_of_tracer(tracer: PyTree, topology: Topology) -> Axis:
    eqn = jax_compat.equation_of(tracer)
    if eqn is None:
        behind = _behind(tracer)
        axis = None if behind is None else _known_axis(behind, topology)
        mapped = getattr(tracer, "batch_dim", None)
        return _without([mapped], axis) if isinstance(mapped, int) else axis
    axes = list(map(functools.partial(_known_axis, topology=topology), eqn.in_tracers))
    outs = _AxisFlow(topology.num_replicas).outputs_of(eqn, axes)
    return outs[jax_compat.output_number(tracer, eqn)]


def axis_of_layout(array: jax.Array, topology: Topology) -> Axis:
    """Returns the axis of an array that its layout on the devices splits over the replicas."""
    if topology.mesh is None or topology.num_replicas == 1:
        return None
    sharding = array.sharding
    if sharding.device_set != set(topology.devices) or sharding.is_fully_replicated:
        return None
    if sharding.is_equivalent_to(topology.per_replica, array.ndim):
        return 0 if array.shape[0] == topology.num_replicas else MIXED
    if not isinstance(sharding, NamedSharding) or sharding.mesh != topology.mesh:
        return MIXED
    names = [name if isinstance(name, tuple) else (name,) for name in sharding.spec]
    axes = [i for i, name in enumerate(names) if topology.axis_name in name]
    if not axes:
        return None
    is_whole = names[axes[0]] == (topology.axis_name,)
    return axes[0] if is_whole and array.shape[axes[0]] == topology.num_replicas else MIXED


def _is_surely_in_front(shape: Shape, new: Shape) -> bool:
    """Returns whether shapes alone tell that tree code left the replica axis in front."""
    count = shape[0]
    if new[:1] != (count,):
        return False
    if count == 1:
        return 1 not in shape[1:] or len(new) >= len(shape)
    return count not in shape[1:] and count not in new[1:]


def _may_hold_all(shape: Shape, new: Shape, topology: Topology) -> bool:
    """Returns whether an array that tree code made may hold all R values, by its shape.

    On devices of their own, a layout tells of most; XLA gives what it concatenates to all.
    """
    is_large = len(new) > 0 and math.prod(new) >= math.prod(shape)
    return shape[0] > 1 and (is_large or (topology.mesh is None and new[:1] == shape[:1]))


def note_rows(stacked: PyTree, topology: Topology) -> None:
    """Remembers that the rows of [R, ...] are values, unless they were turned on their side.

    Where all replicas share one device, nothing but its identity tells it of a concrete array.
    """
    if isinstance(stacked, jax_compat.Tracer):
        axis = replica_axis(stacked, topology)
        note(stacked, topology.num_replicas, 0 if axis in (None, MIXED) else axis)
    elif isinstance(stacked, jax.Array):
        note(stacked, topology.num_replicas, 0)


def is_in_front(child: PyTree, topology: Topology, shape: tuple[int, ...]) -> bool:
    """Returns whether what tree code made of [R, ...] has the replica axis in front, for sure.

    If it may be anywhere, `child` is noted as such; `run` and its like then refuse it.
    """
    while hasattr(child, "primal"):  # a tracer of a derivative
        child = child.primal
    if not isinstance(child, (jax.Array, np.ndarray)):
        return False
    if isinstance(child, jax_compat.Tracer):
        return replica_axis(child, topology) == 0 and child.shape[0] == shape[0]
    if isinstance(child, jax.Array) and (axis := axis_of_layout(child, topology)) is not None:
        return axis == 0
    if _is_surely_in_front(shape, child.shape):
        return True
    if isinstance(child, jax.Array) and _may_hold_all(shape, child.shape, topology):
        note(child, topology.num_replicas, MIXED)
    return False


# -- arguments that are refused -----------------------------------------------


def is_split_over_replicas(value: object, topology: Topology) -> bool:
    """Returns whether each replica's devices hold a different part of array `value`."""
    if isinstance(value, jax_compat.Tracer):
        return False
    if not (isinstance(value, jax.Array) or is_struct(value)):
        return False
    sharding = value.sharding
    if topology.mesh is None or not isinstance(sharding, Sharding):  # None, of a struct
        return False
    if sharding.device_set != set(topology.devices):
        return False
    if topology.num_replicas == 1:  # a single replica holds all of any array
        return False
    if sharding == topology.per_replica:
        return True
    if sharding.is_fully_replicated:
        return False
    indices = sharding.devices_indices_map(value.shape)
    parts = {
        str([indices[d] for d in topology.replica_devices(r)]) for r in range(topology.num_replicas)
    }
    return len(parts) > 1


def holds_rows(value: object, topology: Topology) -> bool:
    """Returns whether a bare array holds a value for each replica, as far as anything tells."""
    if not (isinstance(value, jax.Array) or is_struct(value)):
        return False
    return is_split_over_replicas(value, topology) or _is_derived(value, topology)


def _is_derived(value: PyTree, topology: Topology) -> bool:
    """Returns whether `value` was made of the array of a PerReplica, and holds all R values."""
    if is_struct(value):
        return False
    axis = replica_axis(value, topology)
    return axis is not None and (topology.num_replicas > 1 or axis != MIXED)


def require_not_split(value: object, topology: Topology, where: str) -> None:
    """Raises a LocalityError for a bare array that holds a value for each replica."""
    if not (isinstance(value, jax.Array) or is_struct(value)):
        return
    num_replicas, what = topology.num_replicas, describe_value(value)
    if is_split_over_replicas(value, topology):
        got = f"an array that is split over the {num_replicas} replicas: {what}"
        why = "its rows may be values of the replicas, as after pmap, or copies of one value, or "
        why += "all of it may be one value"
    elif _is_derived(value, topology):
        got = f"an array made of the values of the {num_replicas} replicas: {what}"
        why = "it was computed from the array [R, ...] of a PerReplica, as jax.tree.map and "
        why += "jax.tree.leaves see it, and each replica would get all of it"
    else:
        return
    raise LocalityError(
        f"{where} needs to be a PerReplica, or one value that each replica holds",
        got=got,
        why=why,
        fix="strategy.per_replica(x) if row r is the value of replica r; "
        "strategy.first(x) if the rows are equal; strategy.broadcast(x) if "
        "all of it is one value",
    )


# -- equations ----------------------------------------------------------------


def _shape_of(atom: PyTree) -> Shape:
    """Returns the shape of a tracer, a variable or a literal; () of what has none."""
    return tuple(getattr(atom.aval, "shape", ()))


class _AxisFlow(Flow[Axis]):
    """The axis over R replicas, by the rules below."""

    def __init__(self, num_replicas: int):
        super().__init__()
        self._count = num_replicas

    def of_constant(self, value: object) -> Axis:
        """Returns None: a constant is one value."""
        return None

    def join(self, a: Axis, b: Axis) -> Axis:
        """Returns the axis of two values together."""
        return _joined((a, b))

    def outputs_of(self, eqn: JaxprEqn, ins: list[Axis]) -> Sequence[Axis]:
        """Returns the axes of the results; none for what has no elements along any axis."""
        if all(axis is None for axis in ins):
            return [None] * len(eqn.outvars)
        outs = zip(super().outputs_of(eqn, ins), eqn.outvars, strict=True)
        return [axis if _shape_of(v) else None for axis, v in outs]

    def of_equation(self, eqn: JaxprEqn, ins: list[Axis]) -> Sequence[Axis] | None:
        """Returns the axes by the rule of the primitive."""
        name, params = eqn.primitive.name, eqn.params
        if name == "shard_map":
            return [_axis_of_spec(spec, params["mesh"]) for spec in params["out_specs"]]
        if name == "optimization_barrier":
            return ins
        rule = _RULES.get(name)
        if rule is None:
            return None
        if MIXED in ins:
            return self.of_unknown(eqn, ins)
        shapes = list(map(_shape_of, eqn.invars))
        return [rule(params, ins, shapes, _shape_of(v), self._count) for v in eqn.outvars]

    def of_unknown(self, eqn: JaxprEqn, ins: list[Axis]) -> Sequence[Axis]:
        """Returns MIXED, as no rule tells anything."""
        return [MIXED] * len(eqn.outvars)

    def of_predicate(self, eqn: JaxprEqn, predicate: Axis, outs: list[Axis]) -> list[Axis]:
        """Returns MIXED for what a choice among rows decides on."""
        return outs if predicate is None else [MIXED] * len(outs)

    def of_slice(self, xs: Axis) -> Axis:
        """Returns the axis of a slice of what a scan runs over; of a loop over the rows, MIXED."""
        return MIXED if xs == 0 else _without([0], xs)

    def of_stack(self, y: Axis) -> Axis:
        """Returns the axis once results are stacked in front."""
        return y if y in (None, MIXED) else y + 1


def _axis_of_spec(spec: Sequence[Any], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Axis:
    """Returns the axis that a spec splits along the first axis of `mesh`, that of the replicas."""
    replicas = mesh.axis_names[0]
    return next((i for i, n in enumerate(spec) if n == replicas or n == (replicas,)), None)


def _joined(axes: Sequence[Axis]) -> Axis:
    found = {axis for axis in axes if axis is not None}
    return None if not found else found.pop() if len(found) == 1 else MIXED


def _without(dims: Sequence[int], axis: Axis) -> Axis:
    """Returns where an axis is once other axes are gone; None if it is one of them."""
    if axis is None or axis < 0:
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
    is_kept = axis is not None and axis != MIXED and out[axis] % count == 0
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
    kept: Any = _without(gone, axis)
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
        lambda params, axes, *_: _without(params["axes"], axes[0]),
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
    "unstack": lambda params, axes, *_: _without([params["axis"]], axes[0]),
    "squeeze": lambda params, axes, *_: _without(params["dimensions"], axes[0]),
    "transpose": lambda params, axes, *_: params["permutation"].index(axes[0]),
}
