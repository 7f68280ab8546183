"""What a strategy shows of its values: `describe`, and `assert_mirrored`, which compares copies.

JAX trusts a replicated array: it reads the first copy and never compares. A program that writes a
value without reducing it (a hand-written `shard_map` without checks, an array built by a library)
leaves differing copies behind.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distjax._src import hooks, jax_compat
from distjax._src.context import frames
from distjax._src.objects.stateful import active_bridge
from distjax._src.placement import Topology, is_per_replica
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.tables import Table, as_html, as_text, format_bytes
from distjax._src.typing import PyTree
from distjax._src.variables.description import VariableDescription
from distjax._src.variables.variable import Variable
from distjax.errors import ContextError, LocalityError, describe_value, message


@dataclasses.dataclass(frozen=True)
class StrategyDescription:
    """A snapshot of a strategy; ``print`` it or show it in a notebook.

    With more than `MOST_ROWS` variables, those of repeated layers share a line (``blocks.*.bias``),
    and if that does not suffice, those of a module.

    Attributes:
      strategy: the strategy's repr.
      num_replicas: R.
      devices: its devices, replica by replica.
      devices_per_replica: how many of them each replica owns; 0 where all replicas
        share one device.
      variables: its live variables in order of creation, then those in Flax NNX
        objects placed for it, by name.
      workers: under `ParameterServerStrategy`, the devices of each worker, which has
        `num_replicas` replicas of its own; `devices` lists them all. On Ray, where each
        process has devices of its own, only their numbers are known.
      full: whether each variable has a line of its own, however many there are.
    """

    strategy: str
    num_replicas: int
    devices: tuple[str, ...]
    devices_per_replica: int
    variables: tuple[VariableDescription, ...]
    workers: tuple[tuple[str, ...], ...] = ()
    full: bool = False

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all variables in the memory of each device."""
        return sum(v.bytes_per_device for v in self.variables)

    @property
    def host_bytes(self) -> int:
        """Bytes of all variables in host memory."""
        return sum(v.host_bytes for v in self.variables)

    def __str__(self) -> str:
        return as_text(list(self._tables()))

    __repr__ = __str__  # what a prompt shows

    def _repr_html_(self) -> str:
        return as_html(list(self._tables()))

    def _tables(self) -> Iterator[Table]:
        count = self.devices_per_replica
        share = {0: "shared by all replicas", 1: "one for each replica"}
        share = share.get(count, f"{count} for each replica")
        places = [("devices", self.devices)]
        if self.workers:
            places = [(f"devices of worker {i}", own) for i, own in enumerate(self.workers)]
        is_empty = not (self.variables or self.workers)
        facts = (
            ("replicas of each worker" if self.workers else "replicas", str(self.num_replicas)),
            *((where, f"{len(own)}, {share}: {', '.join(own)}") for where, own in places),
            ("variables", _NONE_YET if is_empty else str(len(self.variables))),
            ("bytes per device", format_bytes(self.bytes_per_device)),
        )
        kinds = {"parameters": 0, "optimizer": 0, "state": 0}
        for variable in self.variables:
            kinds[kind_of(variable.name, variable.trainable)] += variable.bytes_per_device
        if 0 < kinds["parameters"] < self.bytes_per_device:
            labels = ("parameters", "optimizer state", "other state")
            pairs = zip(labels, kinds.values(), strict=True)
            facts += tuple((f"  of {label}", format_bytes(n)) for label, n in pairs if n)
        if self.devices_per_replica and len(self.devices) > 1 and not self.workers:
            total = format_bytes(self.bytes_per_device * len(self.devices))
            facts += (("bytes on all devices", total),)
        if self.host_bytes:
            facts += (("bytes in host memory", format_bytes(self.host_bytes)),)
        yield Table(self.strategy, (), facts)
        if self.variables:
            yield self._variable_table()

    def _variable_table(self) -> Table:
        groups = _in_groups(self.variables, math.inf if self.full else MOST_ROWS)
        header = ("name", "shape", "dtype", "synchronization", "aggregation", "placement")
        columns = [("bytes per device", lambda v: v.bytes_per_device)]
        if self.host_bytes:
            columns.append(("bytes on host", lambda v: v.host_bytes))
        rows = []
        for name, group in groups:
            facts = zip(*map(_facts, group), strict=True)
            sizes = [format_bytes(sum(map(size, group))) for _, size in columns]
            count = f" ({len(group)})" if len(group) > 1 else ""
            rows.append((name + count, *map(_all_of, facts), *sizes))
        return Table("variables:", (*header, *(name for name, _ in columns)), tuple(rows))


#: What has no variables may have models all the same, but at parameter servers.
_NONE_YET = "0; Flax modules come with their first run, or dj.flax.place(module)"
#: How many variables have a line of their own: what fits a screen.
MOST_ROWS = 40


def _in_groups(
    variables: Sequence[VariableDescription], most: float
) -> Iterable[tuple[str, Sequence[VariableDescription]]]:
    """Returns lines and their variables: one each, those of repeated layers, of a module."""
    if len(variables) <= most:
        return [(v.name, [v]) for v in variables]
    groups: dict[str, list[VariableDescription]] = {}
    for variable in variables:
        groups.setdefault(_NUMBER.sub("*", variable.name), []).append(variable)
    depth = max(name.count(".") + name.count("/") for name in groups)
    while len(groups) > most and depth > 0:
        shorter: dict[str, list[VariableDescription]] = {}
        for name, group in groups.items():
            parts = _SEPARATOR.split(name)  # each part, then what separates it from the next
            start = "".join(parts[: 2 * depth - 1])
            shorter.setdefault(f"{start}..." if parts[2 * depth :] else name, []).extend(group)
        groups, depth = shorter, depth - 1
    return groups.items()


#: Names of what optimizers keep: NNX optimizers, and the slots of optax; and of statistics.
_OF_OPTIMIZERS = {"opt_state", "mu", "nu", "trace", "momentum", "accumulator"}
_STATISTICS = {"batch_stats", "stats", "model_state", "metrics"}
_NUMBER, _SEPARATOR = re.compile(r"(?<![^./])\d+(?![^./])"), re.compile(r"([./])")


def kind_of(name: str, trainable: bool) -> str:
    """Returns whether an array is one of the "parameters", the "optimizer" or other "state"."""
    words = set(re.split(r"\W+", name.lower()))
    if words & _OF_OPTIMIZERS:
        return "optimizer"
    return "parameters" if trainable and not words & _STATISTICS else "state"


def _facts(variable: VariableDescription) -> tuple[str, ...]:
    v = variable
    return (str(list(v.shape)), v.dtype, v.synchronization, v.aggregation, v.placement)


def _all_of(facts: Sequence[str]) -> str:
    """Returns what all variables of a line have in common, or that they do not."""
    return facts[0] if len(set(facts)) == 1 else "several"


def describe(
    extended: StrategyExtended,
    variables: Sequence[VariableDescription] | None = None,
    only: object = "",
    full: bool = False,
) -> StrategyDescription:
    """Returns the description of a strategy: see `Strategy.describe`."""
    if not isinstance(only, str):
        raise TypeError(
            message(
                "describe needs a part of the names of variables",
                got=describe_value(only),
                why="it lists the variables that the strategy has placed, of all models",
                fix="with strategy.scope(): dj.flax.place(model), before its first run, and then "
                f"strategy.describe({type(only).__name__!r})",
            )
        )
    topology = extended.topology
    if variables is None:
        living = sorted(extended.variables, key=lambda v: v.serial_number)
        variables = [v.describe() for v in living if v.storage is not None]
    bridge = active_bridge()
    of_objects = bridge.describe(extended.strategy) if bridge is not None else ()
    shared = topology.mesh is None and topology.num_replicas > 1
    return StrategyDescription(
        strategy=repr(extended.strategy),
        num_replicas=topology.num_replicas,
        devices=tuple(map(str, topology.devices)),
        devices_per_replica=0 if shared else len(topology.devices) // topology.num_replicas,
        variables=tuple(v for v in (*variables, *of_objects) if only in v.name),
        full=full,
    )


# -- assert_mirrored -----------------------------------------------------------


class _Copy(NamedTuple):
    """One device's copy of a part of an array, with the same bits for every NaN."""

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
        (name, leaf.stored.hand_out() if isinstance(leaf, Variable) else leaf)
        for name, leaf in named
        if isinstance(leaf, (Variable, jax.Array))
    ]
    copies = {name: list(_copies(array)) for name, array in arrays}
    for told in hooks.on_compared:  # first: other processes get here, too
        told(topology, copies)
    for name, found in copies.items():
        _compare_copies(topology, name, found)


def _name(path: tuple[Any, ...], leaf: object) -> str:
    where = f"the value{jax.tree_util.keystr(path)}"
    return f"{where} (variable {leaf.name!r})" if isinstance(leaf, Variable) else where


def _require_one_value(name: str, leaf: object) -> None:
    in_trace = isinstance(leaf, Variable) and frames.current().state is not None
    if in_trace or isinstance(leaf, jax_compat.Tracer):
        raise ContextError(
            f"assert_mirrored needs values, not a trace of them, in {name}",
            got=f"a traced value, in {frames.current().name}",
            why="the copies exist only when the program runs",
            fix="return the value and call strategy.assert_mirrored(value) outside",
        )
    is_components = isinstance(leaf, Variable) and leaf.policy.stacked
    if is_components or is_per_replica(leaf):
        what = "a sync-on-read variable" if is_components else "a PerReplica"
        raise LocalityError(
            f"assert_mirrored needs one value that every replica holds, in {name}",
            got=f"{what}: a value of its own for each replica",
            why="such values may differ, so nothing can have drifted",
            fix="leave it out, or reduce it first: strategy.reduce('mean', x)",
        )


def _compare_copies(topology: Topology, name: str, copies: Sequence[_Copy]) -> None:
    first: dict[Any, _Copy] = {}
    drifted: list[tuple[_Copy, _Copy, np.ndarray]] = []
    for copy in copies:
        reference = first.setdefault(str(copy.slices), copy)
        varying = _differs(reference.data, copy.data)
        if varying.any():
            drifted.append((reference, copy, varying))
    if drifted:
        raise LocalityError(_drift_text(topology, name, drifted))


def _copies(array: jax.Array) -> Iterator[_Copy]:
    if jax_compat.is_key_dtype(array.dtype):
        array = jax.random.key_data(array)
    for shard in sorted(jax_compat.shards_of(array), key=lambda s: s.device.id):
        yield _Copy(shard.device, shard.index, _with_equal_nans(np.asarray(shard.data)))


def _differs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns where the bits differ."""
    first, second = (np.ascontiguousarray(x[..., None]).view(np.uint8) for x in (a, b))
    return (first != second).any(axis=-1)


def _with_equal_nans(array: np.ndarray) -> np.ndarray:
    """Returns the array, with the same bits for every NaN: any two of them count as equal."""
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
        "strategy.broadcast(np.asarray(x)), or v.assign(np.asarray(v.value))",
    )


def _replica(topology: Topology, device: jax.Device) -> str:
    for replica in range(topology.num_replicas):
        if topology.mesh is not None and device in topology.replica_devices(replica):
            return f"replica {replica} ({device})"
    return str(device)
