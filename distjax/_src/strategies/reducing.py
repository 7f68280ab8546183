"""reduce, gather, reduce_to and broadcast_to, by the locality of the input.

Leaves that are on the replicas become `GlobalValue`s, and one compiled call reduces all of them.
Other leaves, such as host arrays, stand for one value that every replica has: a mean leaves them as
they are, and a sum over several replicas raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from distjax._src import hooks, jax_compat
from distjax._src.collectives.eager import call_compiled
from distjax._src.collectives.ops import (
    as_reduce_op,
    require_dense,
    require_gather_axis,
    require_sums,
)
from distjax._src.collectives.reductions import (
    DEFAULT_OPTIONS,
    CommunicationOptions,
    gather_arrays,
    reduce_arrays,
    reduce_masked,
)
from distjax._src.context import Destinations
from distjax._src.masks import require_mask
from distjax._src.placement import (
    PerReplica,
    Spec,
    Topology,
    is_per_replica,
    note_one_value,
    require_held,
    require_no_mask,
    require_not_split,
    require_same_topology,
    transfer,
    without_alias,
)
from distjax._src.replica.arguments import is_array, mark_modules, unmark
from distjax._src.replica.global_value import GlobalValue, place_output, replica_aval
from distjax._src.replica.merge import call_as_reduction
from distjax._src.strategies.values import is_mirrored, off_device
from distjax._src.traces import is_struct
from distjax._src.typing import AxisLike, PyTree, ReduceOp, ReduceOpLike
from distjax._src.variables.conversion import is_number
from distjax._src.variables.layouts import LaidOut, Layout, PartitionedLayout, spec_of
from distjax._src.variables.variable import ExtendedForVariables, Variable, read_components
from distjax.errors import LocalityError, describe_value, is_int, message, require


def reduce(
    extended: ExtendedForVariables, op: ReduceOpLike, value: PyTree, axis: AxisLike, mask: PyTree
) -> Any:
    """Returns `value` reduced over the replicas: see `Strategy.reduce`."""
    op = as_reduce_op(op)
    require_dense(value, "reduce")
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    is_one = bool(leaves) and jax.tree_util.treedef_is_leaf(treedef)  # true of [] too
    if (axis is not None or mask is not None) and not is_one:
        raise TypeError(
            message(
                "reduce with an axis or a mask needs one value",
                got=f"a tree of {len(leaves)} values",
                why="an axis belongs to one shape",
                fix="jax.tree.map(lambda x: strategy.reduce(op, x, axis=0), tree, "
                "is_leaf=lambda x: isinstance(x, dj.PerReplica))",
            )
        )
    if mask is not None:
        return _reduce_masked(extended, op, leaves[0], axis, mask)
    axes = () if axis is None else _axes(axis, np.shape(leaves[0]))
    return jax.tree.unflatten(treedef, _reduce_leaves(extended, op, leaves, axes))


def _reduce_leaves(
    extended: ExtendedForVariables,
    op: ReduceOp,
    leaves: list[Any],
    axes: tuple[int, ...],
    options: CommunicationOptions = DEFAULT_OPTIONS,
    splits: Sequence[Any] = (),
    specs: Sequence[Spec] = (),
) -> Any:
    is_sum = op is ReduceOp.SUM
    leaves = [_read_foreign(extended, leaf, is_sum=is_sum) for leaf in leaves]
    global_values = [_as_global_value(extended, leaf, is_sum=is_sum) for leaf in leaves]
    found = [x for x in global_values if x is not None]
    for x in found:
        require_sums(x.array.dtype, f"reduce({op.name})")
    is_found = [x is not None for x in global_values]
    of_found = (tuple(compress(each, is_found)) for each in (splits, specs))
    static = (op, tuple(x.varying for x in found), axes, options, *of_found)
    name = op.name if not axes else f"{op.name}_within"
    reduced = iter(_call(extended, name, reduce_arrays, found, *static))
    return [
        next(reduced) if x is not None else _reduce_elsewhere(extended, op, leaf, axes)
        for x, leaf in zip(global_values, leaves, strict=True)
    ]


def _call(
    extended: ExtendedForVariables,
    name: str,
    fn: Callable[..., list[Any]],
    values: Sequence[GlobalValue],
    *static: object,
) -> list[Any]:
    """Returns ``fn(arrays, topology, *static)``, compiled; tracks facts under `name`."""
    if not values:
        return []
    arrays, topology = [x.array for x in values], extended.topology
    if jax_compat.tracing():
        outs = call_as_reduction(name, fn, arrays, topology, *static)
    else:
        told = "strategy.gather" if name == "GATHER" else "strategy.reduce"
        outs = call_compiled(fn, arrays, topology, *static, name=told)
    hooks.tell(hooks.on_reduced, name, values, outs, topology)
    return [note_one_value(out, topology.num_replicas) for out in outs]


def _as_global_value(
    extended: ExtendedForVariables,
    leaf: PyTree,
    role: str = "the value to reduce",
    *,
    is_sum: bool = False,
) -> GlobalValue | None:
    """Returns `leaf` as a global value, or None if it is not on the replicas."""
    if isinstance(leaf, PerReplica):
        require_same_topology(leaf, extended.topology, role)
        return GlobalValue(leaf.stacked, True)
    if isinstance(leaf, Variable):
        return _locate_variable(extended, leaf, role, is_sum=is_sum)
    require_not_split(leaf, extended.topology, role)
    return GlobalValue(leaf, False) if is_mirrored(extended.topology, leaf) else None


def _read_foreign(extended: ExtendedForVariables, leaf: PyTree, *, is_sum: bool = False) -> Any:
    """Returns the value of another strategy's variable, if it has a single one; else `leaf`."""
    is_foreign = isinstance(leaf, Variable) and leaf.strategy is not extended.strategy
    is_refused = is_sum and extended.num_replicas > 1
    return leaf.value if is_foreign and not leaf.policy.stacked and not is_refused else leaf


def _locate_variable(
    extended: ExtendedForVariables, variable: Variable, role: str, *, is_sum: bool
) -> GlobalValue:
    if variable.policy.stacked:
        components = PerReplica(read_components(variable), variable.strategy.extended.topology)
        require_same_topology(components, extended.topology, role)
        return GlobalValue(components.stacked, True)
    if is_sum and extended.num_replicas > 1:
        raise LocalityError(
            f"reduce(SUM) needs a value per replica, not mirrored variable {variable.name!r}",
            got=repr(variable),
            why="its copies are equal: their sum would be R times the variable",
            fix="use v.value as it is; R times it is reduce('sum', v.value)",
        )
    return GlobalValue(variable.value, False)


def _reduce_elsewhere(
    extended: ExtendedForVariables, op: ReduceOp, leaf: PyTree, axes: tuple[int, ...]
) -> Any:
    if op is ReduceOp.SUM and extended.num_replicas > 1:
        raise ValueError(
            message(
                f"A non-DistributedValues value {describe_value(leaf)} cannot be reduced with the "
                "given reduce op ReduceOp.SUM: reduce(SUM) needs a value on the replicas",
                got=describe_value(leaf),
                why="it is not on the strategy's devices, so it is unclear whether it stands for "
                "one value or for R of them",
                fix="return it from strategy.run, or place it: strategy.broadcast(x)"
                + extended.topology.spans_processes
                * "; a number of each process, counted once: strategy.distribute_values_from_"
                "function(lambda ctx: x / len(strategy.extended.worker_devices))",
            )
        )
    _record_lone_value(extended, f"reduce({op.name})", leaf)
    if not axes:
        return leaf
    array = np.asarray(leaf)
    module = np if array.dtype.isbuiltin == 1 else jnp  # numpy sums bfloat16 in bfloat16
    if op is ReduceOp.MEAN:
        return jnp.asarray(module.mean(array, axis=axes))
    # The dtype of a sum on devices, where numpy's would be wider.
    dtype = np.int32 if array.dtype == np.bool_ else array.dtype
    total = module.sum(array, axis=axes, dtype=dtype)
    require_held(total, "reduce(SUM)")
    return jnp.asarray(total)


def _record_lone_value(extended: ExtendedForVariables, method: str, leaf: PyTree) -> None:
    """Records a value that stays as it is: over processes, it has to be that of all of them."""
    if extended.topology.spans_processes and not jax_compat.tracing():
        hooks.tell(hooks.on_host_write, f"{method} of a value of the host", leaf)


def _axes(axis: AxisLike, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes, counted from the front, of one replica's value of this shape."""
    axes: tuple[Any, ...] = tuple(axis) if isinstance(axis, (tuple, list)) else (axis,)
    for a in axes:
        if not is_int(a):
            raise TypeError(
                message(
                    "reduce: axis needs to be None, an int or a tuple of ints",
                    got=describe_value(axis),
                    why="it names axes of one replica's value",
                    fix="strategy.reduce('mean', x, axis=0)",
                )
            )
    ndim = len(shape)
    for a in axes:
        if not -ndim <= a < ndim:
            raise ValueError(
                message(
                    f"reduce: axis needs to be between {-ndim} and {ndim - 1}"
                    if ndim
                    else "reduce: axis needs to be None for values without axes",
                    got=f"axis {a} of a value with {ndim} axes per replica",
                    why="the replica axis does not count: axes are those of one replica's value",
                    fix="strategy.reduce('mean', x, axis=None) to reduce over replicas only",
                )
            )
    axes = tuple(int(a) % ndim for a in axes)
    if len(set(axes)) < len(axes):
        raise ValueError(
            message(
                "reduce: axis needs to name each axis once",
                got=f"{axis} of a value with {ndim} axes per replica",
                why="an axis can be summed over once; a negative number counts from the end",
                fix=f"axis={tuple(sorted(set(axes)))}",
            )
        )
    return axes


def _reduce_masked(
    extended: ExtendedForVariables, op: ReduceOp, value: PyTree, axis: AxisLike, mask: PyTree
) -> Any:
    is_sum = op is ReduceOp.SUM
    require_held(value, f"reduce({op.name})")
    value, mask = _read_foreign(extended, value, is_sum=is_sum), _read_foreign(extended, mask)
    global_value = _as_global_value(extended, value, is_sum=is_sum)
    if global_value is None:
        value = _reduce_elsewhere(extended, op, value, ())  # or raises
        global_value = GlobalValue(jnp.asarray(off_device(value)), False)
    global_mask = _as_global_value(extended, mask, "the mask")
    global_mask = global_mask or GlobalValue(jnp.asarray(off_device(mask)), False)
    shape = global_value.array.shape[int(global_value.varying) :]
    fix = "strategy.reduce('mean', batch_losses, axis=0, mask=batch.mask)"
    require_mask(replica_aval(global_mask), shape, "reduce: mask", fix)
    axes = () if axis is None else _axes(axis, shape)
    out = call_compiled(
        reduce_masked,
        (global_value.array, global_mask.array),
        extended.topology,
        op,
        (global_value.varying, global_mask.varying),
        axes,
        name="strategy.reduce with a mask",
    )
    return note_one_value(out, extended.num_replicas)


# -- gather -------------------------------------------------------------------


def gather(extended: ExtendedForVariables, value: PyTree, axis: int) -> Any:
    """Returns the replicas' values concatenated: see `Strategy.gather`."""
    require_dense(value, "gather")
    leaves, treedef = jax.tree.flatten(value, is_leaf=is_per_replica)
    leaves = [_read_foreign(extended, leaf) for leaf in leaves]
    global_values = [_as_global_value(extended, leaf, "the value to gather") for leaf in leaves]
    found = [x for x in global_values if x is not None]
    for x in found:
        require_gather_axis(x.array.ndim - int(x.varying), axis, "gather")
    varying = tuple(x.varying for x in found)
    gathered = iter(_call(extended, "GATHER", gather_arrays, found, varying, axis))
    for x, leaf in zip(global_values, leaves, strict=True):
        if x is None:
            _record_lone_value(extended, "gather", leaf)
    outs = [
        next(gathered) if x is not None else v for x, v in zip(global_values, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, outs)


def on_host_where(mask: PyTree, gathered: PyTree, axis: int) -> Any:
    """Returns the elements along `axis` for which a gathered mask is True, as numpy arrays."""
    fix = "strategy.gather(y, axis=0, mask=batch.mask), outside dj.jit"
    if jax_compat.tracing():
        raise ValueError(
            message(
                "gather with a mask needs values, not a trace",
                got="a call while a function is traced",
                why="how many elements count is not known before the mask is",
                fix=fix,
            )
        )
    kept = np.asarray(mask)

    def choose(x: jax.Array) -> np.ndarray:
        require(
            kept.dtype == np.bool_ and kept.ndim == 1 and len(kept) == np.shape(x)[axis],
            f"gather needs a bool mask [{np.shape(x)[axis]}], one entry per element of axis {axis}",
            got=f"a mask {kept.dtype}{list(kept.shape)} of all replicas",
            why="it says which of them count",
            fix=fix,
        )
        return np.compress(kept, np.asarray(x), axis)

    return jax.tree.map(choose, gathered)


# -- reduce_to, broadcast_to --------------------------------------------------


def batch_reduce_to(
    extended: ExtendedForVariables,
    op: ReduceOpLike,
    pairs: Sequence[tuple[PyTree, Destinations]],
    communication: CommunicationOptions,
) -> list[Any]:
    """Returns the values of (value, destinations) pairs, reduced and placed."""
    op = as_reduce_op(op)
    pairs = require_pairs(pairs)
    targets = [resolve(extended, destinations, "reduce_to") for _, destinations in pairs]
    require_dense([value for value, _ in pairs], "reduce_to")
    flat = [jax.tree.flatten(value, is_leaf=is_per_replica) for value, _ in pairs]
    leaves = [leaf for values, _ in flat for leaf in values]
    layouts = [
        _layout_beside(extended, destinations, leaf)
        for (values, _), (_, destinations) in zip(flat, pairs, strict=True)
        for leaf in values
    ]
    forms = [None if layout is None else layout.local_form for layout in layouts]
    splits = [form if form is not None and form.is_split else None for form in forms]
    specs = [None if layout is None else spec_of(layout) for layout in layouts]
    reduced = iter(_reduce_leaves(extended, op, leaves, (), communication, splits, specs))
    return [
        jax.tree.unflatten(
            treedef,
            [
                place_on(next(reduced), _fitting(target, destinations, leaf, extended.topology))
                for leaf in values
            ],
        )
        for (values, treedef), target, (_, destinations) in zip(flat, targets, pairs, strict=True)
    ]


def _fitting(
    target: Sharding | None, destinations: Destinations, leaf: PyTree, topology: Topology
) -> Any:
    """Returns where a value goes: split only if it has the variable's shape."""
    if not isinstance(destinations, Variable) or np.shape(leaf) == destinations.shape:
        return target
    return target if target is None or target.is_fully_replicated else topology.mirrored


def _layout_beside(
    extended: ExtendedForVariables, destinations: Destinations, leaf: PyTree
) -> Layout | None:
    """Returns the layout that a reduction is to give a value, or None if it is whole."""
    if not isinstance(destinations, Variable) or destinations.strategy is not extended.strategy:
        return None
    if np.shape(leaf) != destinations.shape:  # e.g. a loss
        return None
    return reduction_layout(extended, destinations)


def require_pairs(pairs: object) -> list[tuple[Any, Any]]:
    """Returns (value, destinations) pairs as a list, or raises a ValueError."""
    listed: list[Any] = list(pairs) if isinstance(pairs, Iterable) else [pairs]
    for pair in listed:
        if not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            raise ValueError(
                message(
                    "batch_reduce_to needs a sequence of (value, destinations) pairs",
                    got=describe_value(pair),
                    why="each value is reduced to destinations of its own",
                    fix="batch_reduce_to('sum', [(grad, variable), ...])",
                )
            )
    return [(value, destinations) for value, destinations in listed]


def broadcast_to(extended: ExtendedForVariables, value: PyTree, destinations: Destinations) -> Any:
    """Returns copies of the leaves of `value` on `destinations`."""
    target = resolve(extended, destinations, "broadcast_to")
    ((value,), _) = mark_modules(((value,), {}))
    has_arrays = any(map(_is_placeable, jax.tree.leaves(value, is_leaf=is_per_replica)))

    def leaf(x: PyTree) -> Any:
        if has_arrays and not _is_placeable(x):
            return x  # a Python object among arrays, which `run` takes as it is
        if isinstance(x, PerReplica):
            raise LocalityError(
                "broadcast_to needs one value",
                got=f"a PerReplica of {x.num_replicas} values",
                why="every destination gets the same value",
                fix="strategy.reduce('mean', x), or strategy.local_results(x)[0]",
            )
        x = x.value if isinstance(x, Variable) else x
        require_no_mask(x, "broadcast_to")
        require_held(x, "broadcast_to")
        x = x if isinstance(x, jax_compat.Tracer) or is_struct(x) else _copied(x)
        is_for_all = target is not None and target == extended.topology.mirrored
        if is_for_all and isinstance(x, jax_compat.Tracer):
            if extended.topology.mesh is None:  # else a step without arguments runs elsewhere
                x = jax.lax.with_sharding_constraint(x, target)
            else:
                x = place_output(x, extended.topology)
            return note_one_value(x, extended.num_replicas)
        if target is not None and not target.is_fully_addressable:
            for told in hooks.on_host_write:
                told("broadcast_to", x)
        return place_on(x, _fitting(target, destinations, x, extended.topology))

    return unmark(jax.tree.map(leaf, value, is_leaf=is_per_replica))


def _copied(value: PyTree) -> jax.Array:
    try:
        return jnp.array(without_alias(value), copy=True)
    except TypeError as error:
        raise TypeError(
            message(
                "broadcast_to needs arrays and numbers",
                got=describe_value(value),
                why="devices hold nothing else",
                fix="strategy.broadcast(...) of the arrays alone",
            )
        ) from error


def _is_placeable(leaf: PyTree) -> bool:
    return is_array(leaf) or is_number(leaf) or isinstance(leaf, (PerReplica, Variable))


# -- destinations ---------------------------------------------------------------


def resolve(
    extended: ExtendedForVariables, destinations: Destinations, method: str
) -> Sharding | None:
    """Returns the sharding that `destinations` stands for; None: any will do."""
    topology = extended.topology
    if destinations is None:
        return topology.mirrored
    if isinstance(destinations, Variable):
        return reduction_layout(destinations.strategy.extended, destinations).sharding
    if isinstance(destinations, PerReplica):
        return destinations.topology.mirrored
    if isinstance(destinations, jax_compat.Tracer):
        return topology.mirrored
    if isinstance(destinations, jax.Array):
        on_all = destinations.sharding.device_set == set(topology.devices)
        return topology.mirrored if on_all else _over(sorted_devices(destinations), topology)
    if isinstance(destinations, (jax.Device, str)):
        destinations = [destinations]
    if isinstance(destinations, (tuple, list)) and destinations:
        devices = [_device(d, method) for d in destinations]
        _require_once(devices, method)
        return _over(devices, topology)
    raise ValueError(_text(method, destinations))


def reduction_layout(extended: ExtendedForVariables, variable: LaidOut) -> Layout:
    """Returns the layout of a value reduced to the devices of `variable`.

    That of an array is unencoded; a program can split a value that R does not divide.
    """
    layout = extended.placement.reduction_layout(variable)
    is_inside = isinstance(layout, PartitionedLayout) and jax_compat.tracing()
    return layout if is_inside else layout.unencoded(variable.shape)


def sorted_devices(array: jax.Array) -> list[jax.Device]:
    """Returns the devices of an array in order of their ids."""
    return sorted(array.sharding.device_set, key=lambda d: d.id)


def _device(item: object, method: str) -> jax.Device:
    if isinstance(item, jax.Device):
        return item
    if isinstance(item, str) and item:
        for device in jax.devices():
            if item.lower().lstrip("/") in (
                f"{device.platform}:{device.id}",
                f"device:{device.platform}:{device.id}",
            ):
                return device
    raise ValueError(_text(method, item))


def _require_once(devices: list[jax.Device], method: str) -> None:
    repeated = next((d for d in devices if devices.count(d) > 1), None)
    if repeated is None:
        return
    raise ValueError(
        message(
            f"{method}: destinations needs to name each device once",
            got=f"{repeated} {devices.count(repeated)} times",
            why="a device holds one copy of a value",
            fix=f"{method}(..., destinations=list(dict.fromkeys(devices)))",
        )
    )


def _over(devices: list[jax.Device], topology: Topology) -> Sharding:
    if tuple(devices) == topology.devices:
        return topology.mirrored
    elsewhere = [d for d in devices if topology.spans_processes and not _is_here(d)]
    if elsewhere:
        raise LocalityError(_elsewhere_text(elsewhere[0]))
    if len(devices) == 1:
        return jax.sharding.SingleDeviceSharding(devices[0])
    mesh = Mesh(np.array(devices, dtype=object), ("copy",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec())


def _is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()


def _elsewhere_text(device: jax.Device) -> str:
    return message(
        "a destination needs devices of this process, or all devices of the strategy",
        got=f"{device} of process {device.process_index}, in process {jax.process_index()}",
        why="nothing is sent to single devices of other processes",
        fix="destinations=None for all devices; or jax.local_devices()[0] on each process",
    )


def place_on(value: PyTree, target: Sharding | None) -> Any:
    """Returns `value` at `target`; traced values are placed where they are used."""
    if target is None or isinstance(value, jax_compat.Tracer):
        return value
    if not isinstance(value, jax.Array):
        require_held(value, "a value for destinations")
        return transfer(value, target) if hasattr(value, "dtype") else value
    is_there = value.committed and value.sharding == target
    return value if is_there else transfer(value, target)


def _text(method: str, destinations: object) -> str:
    return message(
        f"{method}: destinations can not be empty and needs a variable, an array, a PerReplica, a "
        "jax.Device, a sequence of devices, or None",
        got=describe_value(destinations),
        why="it says on which devices the result is needed",
        fix=f"{method}(..., destinations=v) for a variable v; None for all workers",
    )
