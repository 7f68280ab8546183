"""Specs: which axes of a value the devices of one replica hold in parts.

A spec is a `PartitionSpec` over the model axes of a topology. None leaves it to the program, as
XLA propagates it; ``P()`` keeps the value whole on each device. A spec is *canonical* as JAX spells
it on a result: without axes of size 1 and without a trailing None. Otherwise a value would be moved
at every step, to where it already is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from distjax._src import jax_compat, user_lines
from distjax._src.placement.topology import Topology
from distjax._src.typing import PyTree
from distjax.errors import LocalityWarning, describe_value, message

#: What a layout splits within a replica; None: what the program makes of it.
Spec = PartitionSpec | None


def names_in(spec: Iterable[Any]) -> list[str]:
    """Returns the axes of the mesh that a spec names, in order."""
    return [name for entry in spec for name in _names(entry)]


def _names(entry: PyTree) -> tuple[Any, ...]:
    return () if entry is None else tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def parts_of(spec: Spec, axis: int, topology: Topology) -> int:
    """Returns into how many parts the devices of a replica split an axis of a value."""
    sizes = dict(topology.model_axes)
    entry = spec[axis] if spec is not None and axis < len(spec) else None
    return math.prod(sizes[name] for name in _names(entry))


def free_axes(spec: Spec, shape: Sequence[int]) -> list[int]:
    """Returns the axes of a value that the devices of a replica do not split."""
    return [i for i in range(len(shape)) if spec is None or i >= len(spec) or spec[i] is None]


def on_own_parts(
    fn: Callable[..., Any], values: Sequence[jax.Array], specs: Sequence[Spec]
) -> list[Any]:
    """Returns the results of ``fn(*values)``, which each device computes of its own parts.

    In the replica view. XLA gathers what it splits by itself before a collective that moves rows
    (JAX 0.10 to 0.12); a nested map over the model axes leaves it nothing to gather. ``fn`` returns
    as many values as it takes, each split like what it takes.
    """
    names = {name for spec in specs if spec for name in names_in(spec)}
    if not names:
        outs = fn(*values)
    else:
        own = [PartitionSpec() if spec is None else spec for spec in specs]
        outs = jax.shard_map(
            lambda *parts: _listed(fn(*parts)),
            in_specs=tuple(own),
            out_specs=own,
            axis_names=names,
            check_vma=False,
        )(*values)
    return _listed(outs)


def _listed(outs: PyTree) -> list[Any]:
    return list(outs) if isinstance(outs, (list, tuple)) else [outs]


def canonical(spec: Iterable[Any], topology: Topology) -> PartitionSpec:
    """Returns `spec` as JAX spells it on a result."""
    sizes = {} if topology.mesh is None else dict(topology.mesh.shape)
    entries: list[Any] = []
    for entry in spec:
        kept = tuple(name for name in _names(entry) if sizes.get(name, 1) > 1)
        entries.append(kept[0] if len(kept) == 1 else kept or None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def spec_text(spec: Iterable[Any]) -> str:
    """Returns a spec as users write it: "P(None, 'model')"."""
    return f"P({', '.join(map(repr, spec))})"


def spec_of_sharding(sharding: Sharding | None, topology: Topology) -> Spec:
    """Returns what a sharding splits over the model axes; None if it names none of them.

    On another mesh it counts if that has these axes with the same sizes.
    """
    if not isinstance(sharding, NamedSharding) or not topology.model_axes:
        return None
    sizes = dict(topology.model_axes)
    mesh = dict(sharding.mesh.shape)
    kept = [
        tuple(n for n in _names(entry) if n in sizes and mesh[n] == sizes[n])
        for entry in sharding.spec
    ]
    return canonical(kept, topology) or None


def adopted_spec(value: PyTree, topology: Topology, what: str) -> Spec:
    """Returns how a user's array is split within a replica, to be kept; None: it is whole.

    Warns of one that is split over axes that the strategy does not have.
    """
    if not topology.model_axes or not isinstance(value, jax.Array):
        return None
    if isinstance(value, jax_compat.Tracer) or value.sharding.is_fully_replicated:
        return None
    spec = spec_of_sharding(value.sharding, topology)
    if spec is None and not _is_over_replicas(value.sharding, topology):
        warnings.warn(
            message(
                f"{what} needs a sharding over the model axes {_axes_text(topology)} to stay split",
                got=f"{describe_value(value)}, split as {_sharding_text(value.sharding)}",
                why="axes are adopted by their names and sizes, and no axis of it is one of these: "
                "each device will hold all of it",
                fix=f"jax.device_put(x, NamedSharding(strategy.mesh, "
                f"{fitting_text(value.shape, topology)}))",
            ),
            LocalityWarning,
            stacklevel=user_lines.user_stacklevel(),
        )
    return spec


def _is_over_replicas(sharding: Sharding, topology: Topology) -> bool:
    """Returns whether replicas alone split an array: these, or those of another strategy.

    What the replicas split of it, the placement decides.
    """
    return isinstance(sharding, NamedSharding) and all(
        topology.is_replica_axis(name) or sharding.mesh.shape[name] == 1
        for name in names_in(sharding.spec)
    )


def require_spec(
    given: PyTree,
    shape: Sequence[int],
    topology: Topology,
    what: str,
    fix: str = "",
    written: Callable[[str], str] = "sharding={}".format,
) -> PartitionSpec | None:
    """Returns the canonical form of what a user wants split within a replica, or raises.

    Without model axes that is None, whatever is given, so that annotated code runs anywhere. `fix`
    is another remedy of names that are no model axes, `written` returns how a user gives a spec.
    """
    if given is None:
        return None
    if not isinstance(given, (PartitionSpec, NamedSharding)):
        raise TypeError(
            message(
                f"{what} needs a PartitionSpec as sharding",
                got=describe_value(given),
                why="it says for each axis of the value over which model axes it is split",
                fix=f"{written(fitting_text(shape, topology))}, with "
                "from jax.sharding import PartitionSpec as P",
            )
        )
    if not topology.model_axes:
        return None
    if isinstance(given, NamedSharding):
        if given.mesh != topology.mesh:
            raise ValueError(
                _text(
                    what,
                    shape,
                    topology,
                    _other_mesh(given),
                    "the devices of a replica are those of strategy.mesh",
                    written,
                )
            )
        given = given.spec
    for got, why in _misfits(given, shape, topology):
        raise ValueError(
            _text(what, shape, topology, f"{spec_text(given)}: {got}", why, written, fix, given)
        )
    return canonical(given, topology)


def fits(spec: PartitionSpec, shape: Sequence[int], topology: Topology) -> bool:
    """Returns whether a value of this shape can be split so within a replica."""
    return next(_misfits(spec, shape, topology), None) is None


def _misfits(
    spec: PartitionSpec, shape: Sequence[int], topology: Topology
) -> Iterator[tuple[str, str]]:
    """Yields what is wrong with a spec, and why that is."""
    names, sizes = names_in(spec), dict(topology.model_axes)
    if topology.axis_name in names:
        yield f"the replica axis {topology.axis_name!r}", _REPLICA_AXIS_WHY
    unknown = next((name for name in names if name not in sizes), None)
    if unknown is not None:
        yield f"an axis {unknown!r}", f"the model axes are {_axes_text(topology)}"
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        yield f"{twice!r} twice", "an axis of the mesh splits one axis of the value"
    if len(spec) > len(shape):
        yield (
            f"{len(spec)} entries for a value with {len(shape)} axes",
            "there is at most one entry for each axis",
        )
    for i, size in enumerate(shape):
        parts = parts_of(spec, i, topology)
        if size % parts:
            yield (
                f"axis {i} of size {size} over {parts} devices",
                "each device of a replica holds an equal part",
            )


_REPLICA_AXIS_WHY = (
    "a sharding says what is split within a replica; ShardedStrategy(partition='parameters') is "
    "what splits over the replicas too, along an axis that the model axes leave free"
)


def fitting_text(shape: Sequence[int], topology: Topology) -> str:
    """Returns a spec that fits a shape, as users write it."""
    for name, size in topology.model_axes or (("model", 1),):
        for i in reversed(range(len(shape))):
            if shape[i] and shape[i] % size == 0:
                return spec_text([None] * i + [name])
    return "P()"


def _fitting_part(spec: Iterable[Any], shape: Sequence[int], topology: Topology) -> PartitionSpec:
    """Returns what of a spec can stay."""
    kept: list[Any] = []
    for entry in list(spec)[: len(shape)]:
        fits_so = fits(PartitionSpec(*kept, entry), shape, topology)
        kept.append(entry if fits_so else None)
    return canonical(kept, topology)


def _text(
    what: str,
    shape: Sequence[int],
    topology: Topology,
    got: str,
    why: str,
    written: Callable[[str], str],
    fix: str = "",
    given: PartitionSpec | None = None,
) -> str:
    kept = _fitting_part(given or (), shape, topology)
    fitting = spec_text(kept) if kept else fitting_text(shape, topology)
    whole = "" if fitting == "P()" else f"{written(fitting)} fits its shape; "
    return message(
        f"{what} needs a sharding over the model axes that fits its shape {list(shape)}",
        got=got,
        why=why,
        fix=f"{whole}{written('P()')} keeps it whole on each device{'; ' if fix else ''}{fix}",
    )


def _axes_text(topology: Topology) -> str:
    return ", ".join(f"{name!r} of size {size}" for name, size in topology.model_axes)


def _other_mesh(sharding: NamedSharding) -> str:
    return f"a NamedSharding of another mesh, with axes {dict(sharding.mesh.shape)}"


def _sharding_text(sharding: Sharding) -> str:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return f"{spec_text(sharding.spec)} on axes {dict(sharding.mesh.shape)}"
    return type(sharding).__name__
