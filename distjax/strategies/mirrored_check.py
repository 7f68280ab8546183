"""assert_mirrored: finds copies that drifted apart.

JAX trusts a replicated array: it reads the first copy and never compares. A
program that writes a value without reducing it (a hand-written `shard_map`
without checks, an array built by a library) leaves differing copies behind.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distjax import jax_compat
from distjax.cluster.job import Job, job
from distjax.cluster.meeting import exchange
from distjax.context import frames
from distjax.errors import ContextError, LocalityError, message
from distjax.placement.per_replica import is_per_replica
from distjax.placement.topology import Topology
from distjax.typing import PyTree
from distjax.variables.storage import hand_out
from distjax.variables.variable import Variable


class _Copy(NamedTuple):
    """One device's copy of a part of an array."""

    device: jax.Device
    slices: tuple[slice, ...]
    data: np.ndarray


def require_equal_copies(topology: Topology, tree: PyTree) -> None:
    """Raises if copies of a value differ: see `Strategy.assert_mirrored`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_per_replica)
    named = [(_name(path, leaf), leaf) for path, leaf in leaves]
    for name, leaf in named:
        _require_one_value(name, leaf)
    arrays = [
        (name, hand_out(leaf.stored) if isinstance(leaf, Variable) else leaf)
        for name, leaf in named
        if isinstance(leaf, (Variable, jax.Array))
    ]
    if topology.spans_processes and (joined := job()) is not None:
        _compare_processes(joined, arrays)  # first, so that all processes get here
    for name, array in arrays:
        _compare_copies(topology, name, array)


def _name(path: tuple[Any, ...], leaf: object) -> str:
    where = f"the value{jax.tree_util.keystr(path)}"
    return f"{where} (variable {leaf.name!r})" if isinstance(leaf, Variable) else where


def _require_one_value(name: str, leaf: object) -> None:
    in_trace = isinstance(leaf, Variable) and frames.current().state is not None
    if in_trace or isinstance(leaf, jax_compat.Tracer):
        raise ContextError(
            message(
                f"assert_mirrored needs values, not a trace of them, in {name}",
                got=f"a traced value, in {frames.current().name}",
                why="the copies exist only when the program runs",
                fix="return the value and call strategy.assert_mirrored(value) outside",
            )
        )
    is_components = isinstance(leaf, Variable) and leaf.policy.stacked
    if is_components or is_per_replica(leaf):
        what = "a sync-on-read variable" if is_components else "a PerReplica"
        raise LocalityError(
            message(
                f"assert_mirrored needs one value that every replica holds, in {name}",
                got=f"{what}: a value of its own for each replica",
                why="such values may differ, so nothing can have drifted",
                fix="leave it out, or reduce it first: strategy.reduce('mean', x)",
            )
        )


def _compare_copies(topology: Topology, name: str, array: jax.Array) -> None:
    first: dict[Any, _Copy] = {}
    drifted: list[tuple[_Copy, _Copy, np.ndarray]] = []
    for copy in _copies(array):
        reference = first.setdefault(str(copy.slices), copy)
        varying = _differs(reference.data, copy.data)
        if varying.any():
            drifted.append((reference, copy, varying))
    if drifted:
        raise LocalityError(_drift_text(topology, name, drifted))


def _compare_processes(joined: Job, arrays: Sequence[tuple[str, jax.Array]]) -> None:
    """Raises on every process if any part of an array differs between processes."""
    own = {
        f"{name} {copy.slices}": f"{zlib.crc32(_with_equal_nans(copy.data).tobytes()):08x}"
        for name, array in arrays
        for copy in _copies(array)
    }
    everyone = [json.loads(said) for said in exchange(joined, "assert_mirrored", json.dumps(own))]
    first: dict[str, tuple[int, str]] = {}
    for process, sums in enumerate(everyone):
        for part, checksum in sums.items():
            other, expected = first.setdefault(part, (process, checksum))
            if checksum != expected:
                name = next(name for name, _ in arrays if part.startswith(f"{name} ("))
                raise LocalityError(_processes_text(joined, name, (other, process)))


def _processes_text(joined: Job, name: str, pair: tuple[int, int]) -> str:
    first, second = map(joined.name_process, pair)
    return message(
        f"{name} needs to be equal on every replica, and {second} drifted",
        got=f"other values than on {first}",
        why="a program wrote values that were never reduced, or the processes ran different ones",
        fix="reduce before writing: ctx.all_reduce('mean', x); strategy.describe() on each process "
        "says where the value lives",
    )


def _copies(array: jax.Array) -> Iterator[_Copy]:
    if jax_compat.is_key_dtype(array.dtype):
        array = jax.random.key_data(array)
    for shard in sorted(jax_compat.shards_of(array), key=lambda s: s.device.id):
        yield _Copy(shard.device, shard.index, np.asarray(shard.data))


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns where the bits differ; any two NaNs count as equal."""
    first, second = (
        np.ascontiguousarray(_with_equal_nans(x)[..., None]).view(np.uint8) for x in (a, b)
    )
    return (first != second).any(axis=-1)


def _with_equal_nans(array: np.ndarray) -> np.ndarray:
    """Returns the array, with the same bits for every NaN."""
    is_nan = array != array
    return np.where(is_nan, np.array(np.nan, array.dtype), array) if is_nan.any() else array


def _drift_text(
    topology: Topology, name: str, drifted: Sequence[tuple[_Copy, _Copy, np.ndarray]]
) -> str:
    reference, copy, varying = drifted[0]
    local = tuple(int(i) for i in np.argwhere(varying)[0])
    index = tuple(i + (s.start or 0) for i, s in zip(local, copy.slices, strict=True))
    who = ", ".join(_replica(topology, c.device) for _, c, _ in drifted)
    return message(
        f"{name} needs to be equal on every replica, and {who} drifted",
        got=f"at index {index} {copy.data[local]} on {_replica(topology, copy.device)} and "
        f"{reference.data[local]} on {_replica(topology, reference.device)}; "
        f"{int(varying.sum())} of {varying.size} elements differ",
        why="a program wrote values that were never reduced, and JAX reads the first copy only",
        fix="reduce before writing: ctx.all_reduce('mean', x). To go on from the first copy: "
        "strategy.extended.broadcast_to(np.asarray(x)), or v.assign(np.asarray(v.value))",
    )


def _replica(topology: Topology, device: jax.Device) -> str:
    for replica in range(topology.num_replicas):
        if topology.mesh is not None and device in topology.replica_devices(replica):
            return f"replica {replica} ({device})"
    return str(device)
