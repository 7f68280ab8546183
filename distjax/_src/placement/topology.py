"""Which devices there are, how replicas are laid out on them, and how values live there."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from distjax._src import hooks, jax_compat
from distjax.errors import describe_value, is_int, message, require_int

#: The default name of the mesh axis over the replicas.
REPLICA_AXIS = "replica"


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """R replicas on D devices, each owning D / R of them.

    If `mesh` is set, every replica has devices of its own. Otherwise all replicas share one
    device, and the same program runs under `vmap`. Create with `mesh_topology` and
    `one_device_topology`, which return the same object for equal arguments, since every call
    of a program compares topologies.

    Attributes:
      devices: the D devices, replica by replica.
      num_replicas: R.
      axis_name: the name of the replica axis inside a replica function.
      mesh: mesh of shape [R, *model sizes] with axes (axis_name, *model names), all
        axis types Auto; None where all replicas share one device.
      model_axes: (name, size) of the axes inside one replica.
      stands_for: the mesh of the topology for which this one stands in (see `in_force`).
    """

    devices: tuple[jax.Device, ...]
    num_replicas: int
    axis_name: str
    mesh: Mesh | None
    model_axes: tuple[tuple[str, int], ...] = ()
    stands_for: Mesh | None = None

    @property
    def users_mesh(self) -> Mesh | None:
        """The mesh that the user's code names."""
        return self.mesh if self.stands_for is None else self.stands_for

    @property
    def maps_devices(self) -> bool:
        """Whether replicas are mapped over devices, by `shard_map`; else they run under `vmap`.

        XLA takes a map over an axis of size 1 for none at all, and then refuses a sum in it of what
        model axes split (JAX 0.10.2 to 0.12): a single replica of several devices is not mapped.
        """
        return self.mesh is not None and (self.num_replicas > 1 or not self.model_axes)

    def __repr__(self) -> str:
        model = "".join(f", {n}={s}" for n, s in self.model_axes)
        place = str(self.devices[0]) if len(self.devices) == 1 else f"{len(self.devices)} devices"
        return f"Topology(R={self.num_replicas} over {self.axis_name!r} on {place}{model})"

    @functools.cached_property
    def mirrored(self) -> Sharding:
        """The sharding of a value that every replica holds."""
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def per_replica(self) -> Sharding:
        """The sharding of a stacked value [R, ...], one slice per replica."""
        return self.split_along(0)

    def within_replicas(self, spec: PartitionSpec | None) -> Sharding:
        """Returns the sharding of a value that each replica holds, split there as `spec` says."""
        return NamedSharding(self.mesh, spec) if spec and self.mesh is not None else self.mirrored

    def split_along(
        self, axis: int, spec: PartitionSpec | None = None, parts: int | None = None
    ) -> Sharding:
        """Returns the sharding of a value whose `axis` runs over the replicas.

        `spec` says what the devices of each split of it, along other axes. Fewer `parts` than
        replicas, of whose number theirs is a divisor, are each on several.
        """
        if self.mesh is None:
            return jax.sharding.SingleDeviceSharding(self.devices[0])
        entries: list[Any] = list(spec or ())
        entries += [None] * (axis + 1 - len(entries))
        if parts in (None, self.num_replicas):
            entries[axis] = self.axis_name
            return NamedSharding(self.mesh, PartitionSpec(*entries))
        mesh, names = _mesh_of_factors(self.mesh, self.axis_name), list[str]()
        for i, factor in enumerate(_prime_factors(self.num_replicas)):
            if parts % factor == 0:
                names.append(mesh.axis_names[i])
                parts //= factor
        entries[axis] = tuple(names)
        return NamedSharding(mesh, PartitionSpec(*entries))

    def is_replica_axis(self, name: str) -> bool:
        """Returns whether an axis of a mesh runs over replicas: by its name, or a part of it."""
        return re.fullmatch(rf"{re.escape(self.axis_name)}(_\d+)?", name) is not None

    def find_axis(self, shape: Sequence[int], axes: Iterable[int] | None = None) -> int | None:
        """Returns the first of some axes (None: of all) that R divides, or None.

        An axis without elements is left whole.
        """
        axes = range(len(shape)) if axes is None else axes
        return next((i for i in axes if shape[i] and shape[i] % self.num_replicas == 0), None)

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The indices of the processes that own the devices, sorted."""
        return tuple(sorted({d.process_index for d in self.devices}))

    @functools.cached_property
    def spans_processes(self) -> bool:
        """Whether the devices belong to several processes."""
        return len(self.processes) > 1

    @property
    def is_on_first_process(self) -> bool:
        """Whether this process is the first of those that own the devices."""
        return not self.spans_processes or jax.process_index() == self.processes[0]

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """This process's devices, replica by replica; all of them if they are compile-only."""
        if not self.spans_processes or jax_compat.only_compiles(self.devices):
            return self.devices
        here = jax.process_index()
        return tuple(d for d in self.devices if d.process_index == here)

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The replicas with at least one device in this process, in order."""
        if not self.spans_processes:
            return tuple(range(self.num_replicas))
        here = set(self.local_devices)
        replicas = range(self.num_replicas)
        return tuple(r for r in replicas if here.intersection(self.replica_devices(r)))

    def replica_devices(self, replica: int) -> tuple[jax.Device, ...]:
        """Returns the devices of one replica."""
        if self.mesh is None:
            return self.devices
        size = len(self.devices) // self.num_replicas
        return self.devices[replica * size : (replica + 1) * size]


@functools.cache
def _mesh_of_factors(mesh: Mesh | AbstractMesh, axis_name: str) -> Any:
    """Returns the mesh with the replica axis in its prime factors, the smallest first.

    One mesh has any number of parts: in a program that splits over two meshes besides that of the
    replicas, XLA leaves what is split over the last one whole, and JAX fails to name its results.
    """
    count, *others = mesh.shape.values()
    factors = _prime_factors(count)
    names = (*(f"{axis_name}_{i}" for i in range(len(factors))), *mesh.axis_names[1:])
    sizes, types = (*factors, *others), (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, names, axis_types=types)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=types)


@functools.cache
def _prime_factors(count: int) -> tuple[int, ...]:
    factors: list[int] = []
    while (rest := count // math.prod(factors)) > 1:
        factors.append(next(n for n in range(2, rest + 1) if rest % n == 0))
    return tuple(factors)


@functools.cache
def local_devices() -> tuple[jax.Device, ...]:
    """Returns the local devices of the default backend."""
    return tuple(jax.local_devices())


def devices_or_local(devices: Sequence[jax.Device] | None, strategy: str) -> Sequence[jax.Device]:
    """Returns `devices`, or this process's for None or an empty sequence."""
    if devices is None:
        take_local(f"{strategy}()", f"dj.{strategy}(jax.local_devices())")
    given = _given(devices)
    return local_devices() if given is None else given


def devices_or_all(devices: Sequence[jax.Device] | None, strategy: str) -> Sequence[jax.Device]:
    """Returns `devices`, or those of all processes for None or an empty sequence."""
    given = _given(devices)
    for told in hooks.on_all_devices:
        told(strategy, given)
    return jax.devices() if given is None else given


def take_local(call: str, meant: str) -> None:
    """Tells the layers that a call takes this process's devices by default; `meant` says how to."""
    for told in hooks.on_local_devices:
        told(call, meant)


def _given(devices: Sequence[jax.Device] | None) -> Sequence[jax.Device] | None:
    """Returns `devices`; None for an empty sequence."""
    if devices is not None and not hasattr(devices, "__len__"):
        raise ValueError(_devices_text(devices))
    return devices if devices is not None and len(devices) else None


def mesh_topology(
    devices: Sequence[jax.Device], axis_name: str, model_axes: Mapping[str, int] | None = None
) -> Topology:
    """Returns a topology in which each replica has its own devices.

    Args:
      devices: D devices, replica by replica.
      axis_name: the name of the replica axis.
      model_axes: sizes of the axes inside one replica, by name; their product must
        divide D, and R is the quotient.

    Raises:
      ValueError: devices are missing or repeated, or the axes do not fit.
    """
    devices = tuple(devices)
    _require_devices(devices)
    require_axis_name(axis_name)
    axes = _as_axes(model_axes)
    _require_axes(devices, axis_name, axes)
    return _mesh_topology(devices, axis_name, tuple(axes.items()))


@functools.cache
def _mesh_topology(
    devices: tuple[jax.Device, ...], axis_name: str, model_axes: tuple[tuple[str, int], ...]
) -> Topology:
    sizes = tuple(size for _, size in model_axes)
    num_replicas = len(devices) // int(np.prod(sizes, dtype=int))
    mesh = Mesh(
        np.array(devices, dtype=object).reshape(num_replicas, *sizes),
        (axis_name, *(name for name, _ in model_axes)),
        axis_types=(AxisType.Auto,) * (1 + len(sizes)),
    )
    return Topology(devices, num_replicas, axis_name, mesh, model_axes)


def one_device_topology(
    device: jax.Device, num_replicas: int, axis_name: str, stands_for: Mesh | None = None
) -> Topology:
    """Returns a topology in which R replicas share one device."""
    if not isinstance(device, jax.Device):
        raise ValueError(
            message(
                "device needs a jax.Device",
                got=describe_value(device),
                why="the replicas run on a device of the current backend",
                fix="OneDeviceStrategy(jax.devices()[0])",
            )
        )
    require_axis_name(axis_name)
    num_replicas = require_int(
        "num_replicas",
        num_replicas,
        1,
        why="a step runs on at least one replica",
        fix="VirtualStrategy(num_replicas=8)",
    )
    return _one_device_topology(device, num_replicas, axis_name, stands_for)


@functools.cache
def _one_device_topology(
    device: jax.Device, num_replicas: int, axis_name: str, stands_for: Mesh | None
) -> Topology:
    return Topology((device,), num_replicas, axis_name, None, stands_for=stands_for)


@functools.cache
def abstract_topology(num_replicas: int, axis_name: str) -> Topology:
    """Returns the topology of replicas with devices of their own, without naming these.

    Its mesh is abstract: a program traced for it runs on any mesh with as many replicas.
    """
    mesh: Any = AbstractMesh((num_replicas,), (axis_name,), axis_types=(AxisType.Auto,))
    return Topology((), num_replicas, axis_name, mesh)


# -- another number of replicas --------------------------------------------------
# `dj.check` asks what a step would do on other replicas, while other threads go on with their own.

_exchanged: ContextVar[Callable[[Topology], Topology] | None] = ContextVar(
    "distjax_exchanged", default=None
)


@contextlib.contextmanager
def exchanging_topologies(exchange: Callable[[Topology], Topology]) -> Generator[None]:
    """A context in which other topologies stand in for those of strategies, in this thread.

    For traces only: nothing is laid out for these topologies but the arguments of the trace.
    """
    token = _exchanged.set(exchange)
    try:
        yield
    finally:
        _exchanged.reset(token)


def are_exchanged() -> bool:
    """Returns whether other topologies stand in for those of strategies."""
    return _exchanged.get() is not None


def in_force(topology: Topology) -> Topology:
    """Returns the topology that stands in for one of a strategy: mostly itself."""
    exchange = _exchanged.get()
    return topology if exchange is None else exchange(topology)


def _require_devices(devices: tuple[jax.Device, ...]) -> None:
    wrong = [d for d in devices if not isinstance(d, jax.Device)]
    if wrong:
        raise ValueError(_devices_text(wrong[0]))
    if len(set(devices)) != len(devices) or not devices:
        repeated = sorted({str(d) for d in devices if devices.count(d) > 1})
        raise ValueError(
            message(
                "devices needs at least one device. No duplicates allowed",
                got=f"{len(devices)} devices, repeated: {', '.join(repeated) or 'none'}",
                why="each replica has devices of its own",
                fix="MirroredStrategy(jax.devices()); many replicas on one device: "
                "VirtualStrategy(num_replicas)",
            )
        )


def _devices_text(got: object) -> str:
    return message(
        "devices needs a sequence of jax.Device",
        got=describe_value(got),
        why="each replica runs on devices of the current backend",
        fix="MirroredStrategy(jax.devices()[:2])",
    )


def require_axis_name(axis_name: object, fix: str = "MirroredStrategy(axis_name='batch')") -> None:
    """Raises a ValueError unless `axis_name` is a nonempty string."""
    if isinstance(axis_name, str) and axis_name:
        return
    raise ValueError(
        message(
            "axis_name needs a string",
            got=describe_value(axis_name),
            why="collectives inside run find the replica axis by its name",
            fix=fix,
        )
    )


def _as_axes(model_axes: object) -> dict[str, int]:
    axes = model_axes or {}
    if isinstance(axes, Mapping) and all(
        isinstance(name, str) and is_int(size) and size > 0 for name, size in axes.items()
    ):
        return dict(axes)
    raise ValueError(
        message(
            "model_axes needs a dict from names to sizes of 1 or more",
            got=describe_value(model_axes),
            why="each item is a mesh axis inside one replica",
            fix="MirroredStrategy(model_axes={'model': 2})",
        )
    )


def _require_axes(devices: tuple[jax.Device, ...], axis_name: str, axes: Mapping[str, int]) -> None:
    per_replica = int(np.prod(tuple(axes.values()), dtype=int))
    if axis_name in axes:
        raise ValueError(
            message(
                f"model_axes needs names other than the replica axis {axis_name!r}",
                got=f"model_axes={dict(axes)}",
                why="one mesh axis cannot be both",
                fix="rename it: model_axes={'model': 2}; or rename the replica axis: "
                "axis_name='data'",
            )
        )
    if len(devices) % per_replica:
        raise ValueError(
            message(
                f"model_axes={dict(axes)} needs a number of devices divisible by {per_replica}",
                got=f"{len(devices)} devices",
                why="every replica owns the same number of devices",
                fix="pass fewer devices, or sizes whose product divides their number",
            )
        )


# -- how a value lives on them -------------------------------------------------

PER_REPLICA = "per_replica"
MIRRORED = "mirrored"
PARTITIONED = "partitioned"
HOST = "host"
UNPLACED = "unplaced"


def is_host_memory(sharding: Sharding | None) -> bool:
    """Returns whether arrays with `sharding` live in host rather than device memory."""
    kind = None if sharding is None else sharding.memory_kind
    return kind not in (None, "device", "unpinned_host")


@dataclasses.dataclass(frozen=True)
class Locality:
    """How a value lives (`kind`) and on which devices (`sharding`).

    Two localities are equal when the values live in the same way on the same
    devices, so ``locality(slot) == locality(variable)`` states V(variable).

    Attributes:
      kind: "per_replica" (each replica has its own value), "mirrored" (one value, held by
        all), "partitioned" (split over the replicas), "host" (in host memory) or
        "unplaced" (NumPy arrays, Python numbers, arrays on other devices).
      sharding: the JAX sharding; None for "unplaced".

    Source: locality T, M, V(v) and N of tf.distribute.StrategyExtended,
      "Lower-level concepts" (TF 1.13).
    """

    kind: str
    sharding: Sharding | None = None

    def __repr__(self) -> str:
        if self.sharding is None:
            return f"Locality({self.kind})"
        devices = sorted(self.sharding.device_set, key=lambda d: d.id)
        place = str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices"
        return f"Locality({self.kind} on {place})"
