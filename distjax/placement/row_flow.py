"""Which axis of an array runs over the replicas, for arrays that are not a `PerReplica` any more.

To JAX a `PerReplica` is a tree node with one leaf, the array [R, ...]. Tree code takes that leaf
out and computes with it, and nothing in the type of what comes out says that it holds R values.
In a trace the equations say so: they are followed back, from the array to the leaves of
`PerReplica`s, with a rule for each primitive. What no rule knows is `MIXED`: such an array is
refused where one value for all replicas is needed. An array outside of traces has no equations:
its layout on the devices tells, and where all replicas share one device only what was noted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from distjax import jax_compat
from distjax.placement.axis_rules import (
    MIXED,
    Axis,
    Shape,
    axes_after,
    axis_of_spec,
    shape_of,
    without,
)
from distjax.placement.topology import Topology
from distjax.typing import PyTree

#: By `id`, for as long as they live: arrays and tracers, R, and their axis over the replicas.
_noted: dict[int, tuple[weakref.ref[Any], int, Axis]] = {}


def note(value: PyTree, num_replicas: int, axis: Axis) -> None:
    """Remembers the axis of an array over the replicas; None: that it is one value."""
    key = id(value)
    reference = weakref.ref(value, lambda _: _noted.pop(key, None))
    _noted[key] = reference, num_replicas, axis


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
        axis = axis_of_spec(tuple(sharding.spec), sharding.mesh)
        num_replicas = sharding.mesh.shape[name]
        if num_replicas > 1 and axis is not None and given.shape[axis] == num_replicas:
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
        before = [x for x in _made_from(last) if not _recall(x, num_replicas)[0]]
        if _recall(last, num_replicas)[0] or not isinstance(last, jax_compat.Tracer):
            pending.pop()
        elif before and id(last) not in passed:
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
        return without([mapped], axis) if isinstance(mapped, int) else axis
    operands = eqn.in_tracers
    axes = [_known_axis(x, topology) for x in operands]
    shapes = [shape_of(x) for x in operands]
    outs = axes_after(eqn, axes, shapes, topology.num_replicas)
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
    """Returns whether the shape alone tells that tree code left the replica axis in front.

    Args:
      shape: [R, ...], of a PerReplica.
      new: that of the array that tree code made of it.
    """
    count = shape[0]
    if new[:1] != (count,):
        return False
    if count == 1:
        return 1 not in shape[1:] or len(new) >= len(shape)
    return count not in shape[1:] and count not in new[1:]


def _may_hold_all(shape: Shape, new: Shape) -> bool:
    """Returns whether an array that tree code made may hold all R values, by its shape."""
    is_large = math.prod(new) >= math.prod(shape)
    return shape[0] > 1 and (new[:1] == shape[:1] or (len(new) > 0 and is_large))


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
        return replica_axis(child, topology) == 0
    if isinstance(child, jax.Array) and (axis := axis_of_layout(child, topology)) is not None:
        return axis == 0
    if _is_surely_in_front(shape, child.shape):
        return True
    is_untold = topology.mesh is None and isinstance(child, jax.Array)
    if is_untold and _may_hold_all(shape, child.shape):
        note(child, topology.num_replicas, MIXED)
    return False
