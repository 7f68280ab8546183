"""Reductions, gathering and broadcasting in the global view, and how they are communicated.

The functions of the global view take arrays and static arguments, and are meant to be called
through `eager.call_compiled`. An array that is equal on every replica counts as R copies.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from distjax._src.collectives import ops
from distjax._src.collectives.mapping import map_replicas
from distjax._src.masks import spread_mask
from distjax._src.placement import Spec, Topology, on_own_parts
from distjax._src.typing import ReduceOp
from distjax.errors import describe_value, message, require_int

# -- how reductions are communicated --------------------------------------------


_WHY = "it says how reductions travel"
_FIX = "dj.CommunicationOptions(bytes_per_pack=4 * 2**20, compress='bfloat16')"


class CommunicationImplementation(enum.Enum):
    """Which library carries collectives. XLA chooses; the value is stored but unused.

    Source: tf.distribute.experimental.CommunicationImplementation.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """How `reduce_to`, `batch_reduce_to` and optimizers reduce over the replicas.

    Everything else is exact, and travels as it is: `reduce`, `gather`, `broadcast_to`, the
    replica context's `all_reduce`, what variables combine when they are written or read, and the
    results of metrics. Their totals are counts and losses, which bfloat16 would round to two or
    three digits.

    Attributes:
      bytes_per_pack: arrays of one dtype are concatenated into packs of up to this many
        bytes, with one collective per pack; 0 leaves it to XLA.
      compress: None, or "bfloat16": values are sent in bfloat16 and summed in float32,
        which halves the bytes at bfloat16 precision; in two levels, only those across groups.
      devices_per_host: reduce in two levels: a reduce-scatter within groups of this many
        neighboring replicas, an all-reduce across groups, and an all-gather within them;
        0 or 1: one level.
      timeout_seconds: accepted for tf.distribute compatibility; XLA has no such limit.
      implementation: a CommunicationImplementation or its name; stored but unused.

    Raises:
      ValueError: a negative size or an unknown name; also raised by the strategy if
        `devices_per_host` does not divide its number of replicas.

    Source: tf.distribute.experimental.CommunicationOptions.
    """

    bytes_per_pack: int = 0
    compress: str | None = None
    devices_per_host: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        for name in ("bytes_per_pack", "devices_per_host"):
            what, value = f"CommunicationOptions: {name}", getattr(self, name)
            require_int(what, value, 0, why=_WHY, fix=_FIX)
        if self.compress not in (None, "bfloat16"):
            raise ValueError(_text("compress", "None or 'bfloat16'", self.compress))
        name = str(getattr(self.implementation, "name", self.implementation)).upper()
        if name not in CommunicationImplementation.__members__:
            known = ", ".join(CommunicationImplementation.__members__)
            raise ValueError(_text("implementation", f"one of {known}", self.implementation))
        object.__setattr__(self, "implementation", CommunicationImplementation[name])

    def require_equal_hosts(self, num_replicas: int) -> None:
        """Raises a ValueError if `devices_per_host` does not divide the replicas evenly."""
        inside = self.devices_per_host
        if not 1 < inside < num_replicas or num_replicas % inside == 0:
            return
        raise ValueError(
            message(
                f"CommunicationOptions: devices_per_host needs to divide the {num_replicas} "
                "replicas",
                got=f"{inside}, which leaves {num_replicas % inside} over",
                why="a reduction in two levels needs the same number of replicas on every host",
                fix="dj.CommunicationOptions(devices_per_host=0), one level; or the number of "
                "devices of one host",
            )
        )

    def merge(self, options: CommunicationOptions | None) -> CommunicationOptions:
        """Returns these options, overridden by the non-default fields of `options`."""
        if options is None:
            return self
        changed = {
            field.name: getattr(options, field.name)
            for field in dataclasses.fields(self)
            if getattr(options, field.name) != field.default
        }
        return dataclasses.replace(self, **changed)


#: One collective per array, as XLA does by default.
DEFAULT_OPTIONS = CommunicationOptions()


def as_communication_options(options: object) -> CommunicationOptions:
    """Returns `options`, the defaults for None, or raises a TypeError."""
    if options is None or isinstance(options, CommunicationOptions):
        return options or DEFAULT_OPTIONS
    raise TypeError(
        message(
            "communication needs a dj.CommunicationOptions, or None",
            got=describe_value(options),
            why="the options are one object, which is checked when it is created",
            fix="communication=dj.CommunicationOptions(bytes_per_pack=4 * 2**20)",
        )
    )


def _text(name: str, expected: str, value: object) -> str:
    return message(
        f"CommunicationOptions: {name} needs {expected}",
        got=describe_value(value),
        why=_WHY,
        fix=_FIX,
    )


# -- sums, in the replica view --------------------------------------------------


def sum_over_replicas(
    arrays: Sequence[jax.Array], topology: Topology, options: CommunicationOptions
) -> list[jax.Array]:
    """Returns each array summed over the replicas, as specified by `options`.

    Cost: one collective per pack (per array without packing); two if compressed (an all-to-all and
      an all-gather, each of half the bytes); three in two levels, of which the one across hosts is
      two if compressed.
    """
    sum_one = _make_sum(topology, options)
    if options.bytes_per_pack == 0:
        return [sum_one(x) for x in arrays]
    summed: dict[int, jax.Array] = {}
    for pack in packs(arrays, options.bytes_per_pack):
        joined = sum_one(jnp.concatenate([arrays[i].reshape(-1) for i in pack]))
        start = 0
        for i in pack:
            summed[i] = joined[start : start + arrays[i].size].reshape(arrays[i].shape)
            start += arrays[i].size
    return [summed[i] for i in range(len(arrays))]


def sum_split(
    arrays: Sequence[jax.Array],
    specs: Sequence[Spec],
    topology: Topology,
    options: CommunicationOptions,
) -> list[jax.Array]:
    """Returns `sum_over_replicas` of values that the devices of a replica may split.

    Where arrays are joined or cut on the way, each device does so with its own parts.
    """
    moves = options.bytes_per_pack or options.compress or options.devices_per_host > 1
    is_split = [bool(spec and moves and topology.maps_devices) for spec in specs]
    if not any(is_split):
        return sum_over_replicas(arrays, topology, options)
    sums: dict[bool, Iterator[jax.Array]] = {}
    for kind in sorted(set(is_split)):
        own = [i for i, x in enumerate(is_split) if x is kind]
        add = lambda *parts: sum_over_replicas(parts, topology, options)
        kept = [specs[i] if kind else None for i in own]
        sums[kind] = iter(on_own_parts(add, [arrays[i] for i in own], kept))
    return [next(sums[kind]) for kind in is_split]


def packs(arrays: Sequence[jax.Array], bytes_per_pack: int) -> list[list[int]]:
    """Groups arrays by dtype into packs of up to `bytes_per_pack`; returns indices.

    An array larger than that gets a pack of its own.
    """
    made: list[list[int]] = []
    open_packs: dict[Any, tuple[list[int], int]] = {}
    for i, x in enumerate(arrays):
        size = x.size * x.dtype.itemsize
        pack, used = open_packs.get(x.dtype, ([], bytes_per_pack + 1))
        if used + size > bytes_per_pack:
            pack, used = [], 0
            made.append(pack)
        pack.append(i)
        open_packs[x.dtype] = (pack, used + size)
    return made


def _make_sum(
    topology: Topology, options: CommunicationOptions
) -> Callable[[jax.Array], jax.Array]:
    axis, num_replicas, inside = topology.axis_name, topology.num_replicas, options.devices_per_host
    # Groups of replicas require replicas with devices of their own.
    has_levels = topology.mesh is not None and 1 < inside < num_replicas

    def sum_one(x: jax.Array) -> jax.Array:
        is_wide = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 2
        is_compressed = options.compress is not None and is_wide
        if has_levels and x.size:
            return _two_level_sum(x, axis, num_replicas, inside, is_compressed)
        if is_compressed and x.size:
            return _sum_compressed(x, axis, num_replicas)
        return lax.psum(x, axis)

    return sum_one


def _in_chunks(x: jax.Array, count: int) -> jax.Array:
    """Returns the elements of `x` as [count, n], zero-padded at the end."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def _sum_compressed(
    x: jax.Array, axis: str, count: int, groups: Sequence[Sequence[int]] | None = None
) -> jax.Array:
    """Returns the sum over `count` replicas: all of them, or those of a group.

    Replica r receives everyone's chunk r, sums it in float32 and shares it.
    """
    chunks = _in_chunks(x, count).astype(jnp.bfloat16)
    received = lax.all_to_all(chunks, axis, 0, 0, axis_index_groups=groups)
    own_chunk = jnp.sum(received.astype(jnp.float32), axis=0).astype(jnp.bfloat16)
    flat = lax.all_gather(own_chunk, axis, axis_index_groups=groups, tiled=True)
    return flat[: x.size].reshape(x.shape).astype(x.dtype)


def _two_level_sum(
    x: jax.Array, axis: str, num_replicas: int, inside: int, is_compressed: bool
) -> jax.Array:
    """Returns the sum: reduce-scatter within hosts, all-reduce across, all-gather within.

    Compressed is what travels across hosts, where links are slow.
    """
    hosts = range(num_replicas // inside)
    neighbors = [[h * inside + d for d in range(inside)] for h in hosts]
    across = [[h * inside + d for h in hosts] for d in range(inside)]
    part = lax.psum_scatter(
        _in_chunks(x, inside), axis, scatter_dimension=0, axis_index_groups=neighbors
    )
    if is_compressed:
        part = _sum_compressed(part, axis, len(hosts), across)
    else:
        part = lax.psum(part, axis, axis_index_groups=across)
    flat = lax.all_gather(part, axis, axis_index_groups=neighbors, tiled=True)
    return flat[: x.size].reshape(x.shape)


# -- in the global view ---------------------------------------------------------


def reduce_arrays(
    arrays: Sequence[Any],
    topology: Topology,
    op: ReduceOp,
    varying: tuple[bool, ...],
    axes: tuple[int, ...],
    options: CommunicationOptions = DEFAULT_OPTIONS,
    splits: tuple[Any, ...] = (),
    specs: tuple[Spec, ...] = (),
) -> list[jax.Array]:
    """Returns global arrays, [R, ...] if they vary, each summed or averaged over the replicas.

    Over `axes` of each replica's value as well; a mean is then over all elements of all replicas.
    `splits` has the local form of each result that is to be split over the replicas, by a single
    reduce-scatter, `specs` what a layout splits within a replica; () for none.
    """
    count = topology.num_replicas
    specs = specs or (None,) * len(varying)
    splits = splits or (None,) * len(varying)
    differ = [i for i, varies in enumerate(varying) if varies]
    whole = [i for i in differ if splits[i] is None]

    def on_replica(*local: jax.Array) -> list[Any]:
        parts = dict(zip(differ, local, strict=True))
        for i, x in parts.items():
            parts[i] = ops.as_summand(op, _within(op, x, axes), "reduce")
        summed = sum_split([parts[i] for i in whole], [specs[i] for i in whole], topology, options)
        totals = dict(zip(whole, summed, strict=True))
        return [
            ops.from_total(op, totals[i], count)
            if i in totals
            else splits[i].reduce(op, parts[i], topology)
            for i in differ
        ]

    arrays = [jnp.asarray(a) for a in arrays]
    reduced: dict[int, Any] = {}
    if differ:
        scattered = [splits[i] is not None for i in differ]
        given = [arrays[i] for i in differ]
        outs = map_replicas(topology, on_replica, given, [True] * len(differ), scattered)
        reduced.update(zip(differ, outs, strict=True))
    for i in differ:
        if splits[i] is not None:
            reduced[i] = splits[i].from_replicas(reduced[i])

    def combine(*equal: jax.Array) -> list[jax.Array]:
        own = [ops.as_summand(op, _within(op, x, axes), "reduce") for x in equal]
        return [x * count for x in own] if op is ReduceOp.SUM else own

    rest = [i for i in range(len(arrays)) if i not in reduced]
    equal = [arrays[i] for i in rest]
    if count > 1:  # equal on all replicas: there is nothing to communicate
        reduced.update(zip(rest, combine(*equal), strict=True))
    elif rest:  # mapped, so that the result of one replica is another array than the argument
        outs = map_replicas(topology, combine, equal, [False] * len(rest), False)
        reduced.update(zip(rest, outs, strict=True))
    return [reduced[i] for i in range(len(arrays))]


def _within(op: ReduceOp, x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    if not axes:
        return x
    if op is ReduceOp.MEAN:
        return jnp.mean(x.astype(ops.mean_dtype(x.dtype)), axis=axes)
    return lax.reduce_sum(x, axes) if x.dtype != jnp.bool_ else jnp.sum(x, axis=axes)


def reduce_masked(
    arrays: tuple[Any, Any],
    topology: Topology,
    op: ReduceOp,
    varying: tuple[bool, bool],
    axes: tuple[int, ...],
) -> jax.Array:
    """Returns the sum or mean over replicas of the elements where the mask is True.

    A value [B, ...] and a mask [B] (its shape may be any leading part of the value's), each with a
    leading replica axis if it varies; over `axes` of the value as well.
    """

    def on_replica(value: jax.Array, mask: jax.Array) -> list[Any]:
        mask = spread_mask(mask, value.shape)
        kept = ops.as_summand(op, jnp.where(mask, value, jnp.zeros_like(value)), "reduce")
        wide = kept.dtype if op is ReduceOp.SUM else ops.sum_dtype(kept.dtype)
        total = lax.psum(jnp.sum(kept, axis=axes, dtype=wide), topology.axis_name)
        if op is ReduceOp.SUM:
            return [total]
        count = lax.psum(jnp.sum(mask, axis=axes, dtype=wide), topology.axis_name)
        return [(total / count).astype(kept.dtype)]

    values = [jnp.asarray(a) for a in arrays]
    return map_replicas(topology, on_replica, values, varying, [False])[0]


def gather_arrays(
    arrays: Sequence[Any], topology: Topology, varying: tuple[bool, ...], axis: int
) -> list[jax.Array]:
    """Returns each array's replica values concatenated along `axis`."""

    def on_replica(*local: jax.Array) -> list[Any]:
        return [
            ops.all_gather(x, axis, topology.axis_name)
            if varies
            else jnp.concatenate([x] * topology.num_replicas, axis)
            for x, varies in zip(local, varying, strict=True)
        ]

    arrays = [jnp.asarray(a) for a in arrays]
    return map_replicas(topology, on_replica, arrays, varying, [False] * len(arrays))


def combine_components(stored: jax.Array, topology: Topology, rule: str) -> jax.Array:
    """Combines a variable's components [R, ...] into one value, by `ops.combine`."""

    def on_replica(x: jax.Array) -> list[Any]:
        return [ops.combine(rule, x, topology.axis_name, topology.num_replicas)]

    return map_replicas(topology, on_replica, [stored], [True], [False])[0]
