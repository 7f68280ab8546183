"""How a variable's value is stored, what one replica holds of it, and who decides that.

A variable has up to three forms: *stored* (the array that lives between steps), *global* (what
cross-replica code works on: [...], or [R, ...] with a component per replica) and *local* (what one
replica holds). A `Layout` converts between the stored and the global form, its `local_form` between
the global and the local form. The `VariablePlacement` of a strategy picks the layout of each
variable; two are here, others stand beside their strategy.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import (
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from distjax._src import jax_compat, user_mesh
from distjax._src.collectives.eager import call_compiled
from distjax._src.collectives.mapping import constrain_to_replicas
from distjax._src.collectives.ops import all_reduce, as_summand, from_total, own_index
from distjax._src.placement import (
    Spec,
    Topology,
    free_axes,
    on_own_parts,
    spec_of_sharding,
    spec_text,
    transfer,
)
from distjax._src.placement import topology as kinds
from distjax._src.traces import struct
from distjax._src.typing import DTypeLike, ReduceOp

# -- what one replica holds ----------------------------------------------------


class LocalForm(Protocol):
    """How the local form of a value and its global form convert to each other.

    That is `UnsplitForm`, `Shards`, or a `PartitionedLayout` itself; custom classes work as well.
    """

    @property
    def varying(self) -> bool:
        """Whether the replicas hold different arrays: shards, or components."""
        ...

    @property
    def is_split(self) -> bool:
        """Whether a replica holds a shard and gathers the value when reading it."""
        ...

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the global form of a value of `shape`."""
        ...

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what one replica holds of a value of `shape`."""
        ...

    # In the global view.

    def to_replicas(self, value: jax.Array) -> Any:
        """Returns what the replicas hold of a global value; [R, ...] if `varying`."""
        ...

    def from_replicas(self, array: jax.Array) -> Any:
        """Inverts `to_replicas`: returns the global value from what the replicas hold."""
        ...

    def spread(self, value: jax.Array) -> Any:
        """Constrains a traced global value [...] to be computed shard by shard."""
        ...

    # In the replica view.

    def gather(self, local: jax.Array) -> Any:
        """Returns the value that a replica reads, from what it holds."""
        ...

    def own_part(self, value: jax.Array) -> Any:
        """Returns this replica's part of a value [...] that is equal on all replicas."""
        ...

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> Any:
        """Returns this replica's part of the sum or mean of the replicas' values [...]."""
        ...


@dataclasses.dataclass(frozen=True)
class UnsplitForm:
    """Each replica holds all that it reads: the value, or one of R `num_components`."""

    num_components: int | None
    is_split = False

    @property
    def varying(self) -> bool:
        """Whether each replica has its own component."""
        return self.num_components is not None

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape if self.num_components is None else (self.num_components, *shape)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def to_replicas(self, value: jax.Array) -> Any:
        return value

    def from_replicas(self, array: jax.Array) -> Any:
        return array

    def spread(self, value: jax.Array) -> Any:
        return value

    def gather(self, local: jax.Array) -> Any:
        return local

    def own_part(self, value: jax.Array) -> Any:
        return value

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> jax.Array:
        """Returns the sum or mean, by an all-reduce."""
        return all_reduce(op, value, topology.axis_name, topology.num_replicas)


#: The form of a value that every replica holds whole.
WHOLE = UnsplitForm(None)


@dataclasses.dataclass(frozen=True)
class Shards:
    """The local form of a value that a pair of functions splits into R equal shards.

    Everything follows from the pair: a replica's own shard is an element of
    ``split(value)``, gathering is `join` after an all-gather, and reducing is a
    reduce-scatter after `split`.

    Attributes:
      topology: the R replicas.
      split: takes a value [...] of any dtype, returns its shards [R, ...].
      join: the inverse of `split`.
      sharding: the sharding of the sharded value; None leaves it to the compiler.

    Both functions only rearrange (reshape, transpose, slice, concatenate, pad), and are
    module-level functions or methods of a frozen dataclass, so that equal shards of two
    variables compare equal and are compiled once.
    """

    topology: Topology
    split: Callable[[Any], Any]
    join: Callable[[Any], Any]
    sharding: Sharding | None = None
    varying = True
    is_split = True

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(jax.eval_shape(self.split, struct(shape, jnp.float32)).shape[1:])

    def to_replicas(self, value: jax.Array) -> Any:
        """Returns ``split(value)``."""
        return self.split(value)

    def from_replicas(self, array: jax.Array) -> Any:
        """Returns ``join(array)``."""
        return self.spread(self.join(array))

    def spread(self, value: jax.Array) -> Any:
        """Returns `value`, constrained to `sharding` if there is one."""
        sharding = self.sharding
        return value if sharding is None else lax.with_sharding_constraint(value, sharding)

    def gather(self, local: jax.Array) -> Any:
        """Returns the whole value, by an all-gather."""
        return self.join(lax.all_gather(local, self.topology.axis_name))

    def own_part(self, value: jax.Array) -> Any:
        own = own_index(self.topology.axis_name)
        return lax.dynamic_index_in_dim(self.split(value), own, keepdims=False)

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> jax.Array:
        """Returns this replica's shard of the sum or mean, by a reduce-scatter."""
        shards = self.split(as_summand(op, value, "a reduction to shards"))
        return from_total(op, lax.psum_scatter(shards, topology.axis_name), topology.num_replicas)


# -- how a value is stored -----------------------------------------------------


class Layout(Protocol):
    """How a variable's value is stored.

    A custom layout implements these members; nothing checks its class. Instances are
    immutable and compare by value: use a frozen dataclass. ``str(layout)`` is how
    descriptions of a variable say where it lives.
    """

    @property
    def kind(self) -> str:
        """The kind of the variable's `Locality`."""
        ...

    @property
    def num_copies(self) -> int:
        """How many copies `update` and `local_results` see: R or 1."""
        ...

    @property
    def sharding(self) -> Sharding | None:
        """Where the stored array lives; None: JAX's default device."""
        ...

    @property
    def local_form(self) -> LocalForm:
        """What one replica holds: `WHOLE`, `Shards(...)`; of a `PartitionedLayout`, itself."""
        ...

    @property
    def hands_out_copies(self) -> bool:
        """Whether `from_stored` makes a new array.

        If False, the stored array is the value: it is handed out as it is, and copied if it
        is still referenced when a program is about to donate its memory.
        """
        ...

    def to_stored(self, value: jax.Array) -> Any:
        """Returns the stored form of a global value, inside or outside a trace."""
        ...

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns the global value of shape `shape`, inside or outside a trace."""
        ...

    def constrain(self, stored: jax.Array) -> Any:
        """Constrains a stored form that a program returns to where it lives.

        Inside a trace; usually `jax.lax.with_sharding_constraint(stored, self.sharding)`.
        """
        ...

    def unencoded(self, shape: tuple[int, ...]) -> Layout:
        """Returns the nearest layout that stores a value of `shape` as it is.

        For arrays that are also read by code without a layout (those of Flax modules), and
        for reduced values. A layout whose stored form is the value itself, wherever it
        lives, returns itself; `MirroredLayout(topology)` is always a valid answer.
        """
        ...


class _AsItIs:
    """What layouts have in common whose stored form is the value itself, on devices."""

    hands_out_copies = False

    def to_stored(self, value: jax.Array) -> Any:
        return value

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        return stored

    def unencoded(self, shape: tuple[int, ...]) -> Any:
        return self


class _InHostMemory:
    """What layouts have in common whose stored form is in host memory: values are copies."""

    kind = kinds.HOST
    num_copies = 1
    local_form = WHOLE
    hands_out_copies = True

    def __str__(self) -> str:
        return "host memory"

    def constrain(self, stored: jax.Array) -> Any:
        """Returns `stored`, which `to_stored` has already placed."""
        return stored


@dataclasses.dataclass(frozen=True)
class MirroredLayout(_AsItIs):
    """One value [...] with a copy on each replica: `P()`.

    Attributes:
      topology: the R replicas.
      spec: what the devices of a replica split of it; None: what the program makes of it.
      why: why it is whole where others are split, for descriptions.
    """

    topology: Topology
    spec: Spec = None
    why: str = dataclasses.field(default="", compare=False)
    kind = kinds.MIRRORED
    local_form = WHOLE

    def __str__(self) -> str:
        return f"mirrored{_within(self.spec)}{f' ({self.why})' if self.why else ''}"

    @property
    def num_copies(self) -> int:
        return self.topology.num_replicas

    @property
    def sharding(self) -> Sharding:
        """`P()`: replicated; `spec` if it is split within each replica."""
        return self.topology.within_replicas(self.spec)

    def constrain(self, stored: jax.Array) -> jax.Array:
        if self.spec is None or self.topology.mesh is None:
            return constrain_to_replicas(stored, self.topology, varying=False)
        return lax.with_sharding_constraint(stored, self.sharding)


def _within(spec: Spec) -> str:
    return f", each split {spec_text(spec)}" if spec else ""


@dataclasses.dataclass(frozen=True)
class StackedLayout(_AsItIs):
    """One component per replica, [R, ...]: `P(replica)`."""

    topology: Topology
    kind = kinds.PER_REPLICA

    def __str__(self) -> str:
        return "per replica"

    @property
    def num_copies(self) -> int:
        return self.topology.num_replicas

    @property
    def sharding(self) -> Sharding:
        """`P(replica)`: split along the leading axis."""
        return self.topology.per_replica

    @property
    def local_form(self) -> UnsplitForm:
        """Each replica's own component."""
        return UnsplitForm(self.topology.num_replicas)

    def constrain(self, stored: jax.Array) -> jax.Array:
        return constrain_to_replicas(stored, self.topology, varying=True)

    def unencoded(self, shape: tuple[int, ...]) -> MirroredLayout:
        """Returns the mirrored layout, since a single value has no components."""
        return MirroredLayout(self.topology)


@dataclasses.dataclass(frozen=True)
class OneDeviceLayout(_AsItIs):
    """One value [...] on one device (None: JAX's default device, uncommitted)."""

    device: jax.Device | None = None
    kind = kinds.MIRRORED
    num_copies = 1
    local_form = WHOLE

    def __str__(self) -> str:
        return "mirrored"

    @property
    def sharding(self) -> Sharding | None:
        """The device; None: JAX's default device, uncommitted."""
        return None if self.device is None else SingleDeviceSharding(self.device)

    def constrain(self, stored: jax.Array) -> jax.Array:
        """Returns `stored`: the program runs on the device."""
        return jnp.asarray(stored)


@dataclasses.dataclass(frozen=True)
class PartitionedLayout:
    """One value [...] split over the replicas into R equal parts along `axis`; each holds one.

    It is a layout and its own local form. If R does not divide the axis, the last parts end in
    zeros. A replica, and the stored array, have them; a value has none: XLA leaves them out of what
    it computes of such a value. With `blocks`, it is the last parts of each block, and the value
    lives by blocks, without zeros.

    Attributes:
      topology: the R replicas.
      axis: the axis.
      spec: what the devices of a replica split, along other axes; None: nothing, or what the
        program makes of it.
      size: the size of the axis if R does not divide it; None: R divides it. The stored array then
        has zeros behind the value, and `v.value` outside of programs is a copy, whole on each
        replica.
      blocks: a common divisor of R and the size. If more than 1, the stored array is the value,
        split into so many parts: R / blocks neighboring replicas share each, and compute with a
        part of it.
    """

    topology: Topology
    axis: int
    spec: Spec = None
    size: int | None = None
    blocks: int = 1
    kind = kinds.PARTITIONED
    num_copies = 1
    varying = True
    is_split = True

    def __str__(self) -> str:
        how = f", {self.size} padded to {self._padded_size}" if self.hands_out_copies else ""
        how = f" in {self.blocks} parts" if self.blocks > 1 else how
        return f"partitioned on axis {self.axis}{how}{_within(self.spec)}"

    @property
    def local_form(self) -> PartitionedLayout:
        """Itself: the parts along the axis."""
        return self

    @property
    def sharding(self) -> Sharding:
        """`P(..., replica)` with the replica axis at `axis`; by blocks if there are any."""
        parts = self.blocks if self.blocks > 1 else None
        return self.topology.split_along(self.axis, self.spec, parts)

    # -- as it is stored --------------------------------------------------------

    @property
    def _padded_size(self) -> int:
        size = self.size or 0
        return size + -size % self.topology.num_replicas

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the stored array of a value of `shape`."""
        if not self.hands_out_copies:
            return shape
        return (*shape[: self.axis], self._padded_size, *shape[self.axis + 1 :])

    @property
    def hands_out_copies(self) -> bool:
        """Whether the stored array is padded."""
        return self.size is not None and self.blocks == 1

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value`, padded if R does not divide the axis."""
        if not self.hands_out_copies:
            return value
        if isinstance(value, np.ndarray):  # it need not be whole on a device
            widths = [(0, 0)] * value.ndim
            widths[self.axis] = (0, self._padded_size - value.shape[self.axis])
            return np.pad(value, widths)
        if not isinstance(value, jax_compat.Tracer):
            if value.is_fully_addressable:
                return _padded_here(value, self)
            return call_compiled(_padded, value, self, name="a write of a padded variable")
        return self.spread(self.padded(self.spread(value)))

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns the value: in a program split as it is stored, outside as a whole copy."""
        if not self.hands_out_copies:
            return stored
        if not isinstance(stored, jax_compat.Tracer):
            return call_compiled(_unpadded, stored, self, name="the read of a padded variable")
        return self.spread(self.unpadded(stored))

    def constrain(self, stored: jax.Array) -> Any:
        return self.spread(stored)

    def unencoded(self, shape: tuple[int, ...]) -> PartitionedLayout | MirroredLayout:
        """Returns itself; if R does not divide the axis, in the most parts that an axis allows."""
        if not self.hands_out_copies:
            return self
        count = self.topology.num_replicas
        axes = free_axes(self.spec, shape)
        axis = max(axes, key=lambda i: math.gcd(shape[i], count))
        blocks = math.gcd(shape[axis], count)
        if blocks == 1:
            why = f"no axis has a divisor in common with {count} replicas"
            return MirroredLayout(self.topology, self.spec, why)
        return PartitionedLayout(self.topology, axis, self.spec, shape[axis], blocks)

    # -- what one replica holds --------------------------------------------------

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        of_block, sharers = shape[self.axis] // self.blocks, self._num_replicas // self.blocks
        return (*shape[: self.axis], -(-of_block // sharers), *shape[self.axis + 1 :])

    @property
    def _num_replicas(self) -> int:
        return self.topology.num_replicas

    def padded(self, value: jax.Array) -> jax.Array:
        """Returns a value with zeros behind it, or its blocks, so that R divides the axis."""
        if self.size is None:
            return value
        before, behind = value.shape[: self.axis], value.shape[self.axis + 1 :]
        by_block = value.reshape(*before, self.blocks, self.size // self.blocks, *behind)
        widths = [(0, 0, 0)] * by_block.ndim
        missing = -(self.size // self.blocks) % (self._num_replicas // self.blocks)
        widths[self.axis + 1] = (0, missing, 0)
        by_block = lax.pad(by_block, np.zeros((), value.dtype), widths)  # a literal in a trace
        return by_block.reshape(*before, -1, *behind)

    def unpadded(self, value: jax.Array) -> jax.Array:
        """Inverts `padded`."""
        if self.size is None:
            return value
        before, behind = value.shape[: self.axis], value.shape[self.axis + 1 :]
        by_block = value.reshape(*before, self.blocks, -1, *behind)
        of_block = self.size // self.blocks
        by_block = lax.slice_in_dim(by_block, 0, of_block, axis=self.axis + 1)
        return by_block.reshape(*before, self.size, *behind)

    def _split_evenly(self, padded: jax.Array) -> jax.Array:
        if self.topology.mesh is None:
            return padded
        return lax.with_sharding_constraint(padded, self.topology.split_along(self.axis, self.spec))

    def to_replicas(self, value: jax.Array) -> jax.Array:
        """Returns the shards of a value as [R, ...]; no data moves."""
        if self.size is not None:
            value = self._split_evenly(self.padded(self.spread(value)))
        count = self.topology.num_replicas
        shape = value.shape
        split = (*shape[: self.axis], count, shape[self.axis] // count, *shape[self.axis + 1 :])
        stacked = jnp.moveaxis(value.reshape(split), self.axis, 0)
        if not self.spec:
            return stacked
        spec = PartitionSpec(self.topology.axis_name, *self.spec)
        return lax.with_sharding_constraint(stacked, NamedSharding(self._mesh, spec))

    def from_replicas(self, array: jax.Array) -> jax.Array:
        """Returns the value from its shards [R, ...]; no data moves but within blocks."""
        split = jnp.moveaxis(array, 0, self.axis)
        shape = split.shape
        whole = shape[self.axis] * shape[self.axis + 1]
        value = split.reshape(*shape[: self.axis], whole, *shape[self.axis + 2 :])
        value = self._split_evenly(value)
        return value if self.size is None else self.spread(self.unpadded(value))

    @property
    def _mesh(self) -> Mesh:
        assert self.topology.mesh is not None, "only replicas with devices of their own split more"
        return self.topology.mesh

    def spread(self, value: jax.Array) -> jax.Array:
        """Returns `value` constrained so that each device computes its shard, or its block.

        In a program it need not be padded for that, as an array has to be.
        """
        is_uneven = self.size is not None and value.shape[self.axis] == self.size
        if is_uneven and self.blocks == 1 and not isinstance(value, jax_compat.Tracer):
            return value  # under `jax.disable_jit`
        if self.topology.mesh is None:
            return value
        return lax.with_sharding_constraint(value, self.sharding)

    def gather(self, local: jax.Array) -> jax.Array:
        """Returns the whole value, by an all-gather."""
        name, axis = self.topology.axis_name, self.axis
        gather = lambda x: self.unpadded(lax.all_gather(x, name, axis=axis, tiled=True))
        return on_own_parts(self._as_one(gather), [local], [self.spec])[0]

    def own_part(self, value: jax.Array) -> jax.Array:
        value = self.padded(value)
        size = value.shape[self.axis] // self.topology.num_replicas
        start = own_index(self.topology.axis_name) * size
        return lax.dynamic_slice_in_dim(value, start, size, self.axis)

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> jax.Array:
        """Returns this replica's shard of the sum or mean, by a reduce-scatter."""
        summand, axis = as_summand(op, value, "a reduction to shards"), self.axis
        name = topology.axis_name
        scatter = lambda x: lax.psum_scatter(
            self.padded(x), name, scatter_dimension=axis, tiled=True
        )
        total = on_own_parts(self._as_one(scatter), [summand], [self.spec])[0]
        return from_total(op, total, topology.num_replicas)

    def _as_one(self, collective: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Returns a collective that, with its padding, is one equation: scans take it by layer."""
        is_one = self.size is None or self.spec  # of the latter `on_own_parts` makes a map
        return collective if is_one else jax.jit(collective)


#: A `PartitionedLayout` as what one replica holds: for layouts that store such a value otherwise.
AxisShards = PartitionedLayout


def _padded(value: jax.Array, form: PartitionedLayout) -> jax.Array:
    return form.padded(value)


def _unpadded(stored: jax.Array, form: PartitionedLayout) -> jax.Array:
    return form.unpadded(stored)


# Compiled, since the zeros would trip transfer guards.
_padded_here = jax.jit(_padded, static_argnums=1)


def split_along(
    topology: Topology, shape: Sequence[int], axes: Sequence[int], spec: Spec = None
) -> PartitionedLayout | None:
    """Returns how a value is split over the replicas, or None if there is nothing to split.

    Along the first of `axes` that R divides; else along the one that needs the least padding.
    """
    axis = topology.find_axis(shape, axes)
    if axis is not None:
        return PartitionedLayout(topology, axis, spec)
    axes = [i for i in axes if 0 not in shape]
    if not axes:
        return None
    count = topology.num_replicas
    axis = min(axes, key=lambda i: -(-shape[i] // count) / shape[i])
    return PartitionedLayout(topology, axis, spec, shape[axis])


@dataclasses.dataclass(frozen=True)
class HostShardedLayout(_InHostMemory):
    """One value [...] in host memory, split along `axis` over the host's devices.

    For arrays that must keep their shape, such as those of Flax variables. `HostLayout`
    stores values flat, and so needs no axis that R divides.
    """

    topology: Topology
    axis: int
    memory_kind: str
    spec: Spec = None

    @property
    def sharding(self) -> Sharding:
        """Split along the axis, in host memory."""
        return self._on_devices.with_memory_kind(self.memory_kind)

    @property
    def _on_devices(self) -> Any:
        return self.topology.split_along(self.axis, self.spec)

    def to_stored(self, value: jax.Array) -> Any:
        return transfer(transfer(value, self._on_devices), self.sharding)

    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns the value, copied to each device."""
        on_devices = self.topology.within_replicas(self.spec)
        return transfer(transfer(stored, self._on_devices), on_devices)

    def unencoded(self, shape: tuple[int, ...]) -> HostShardedLayout:
        return self


@dataclasses.dataclass(frozen=True)
class HostLayout(_InHostMemory):
    """One value in host memory, flattened, padded and split over the host's devices.

    A replicated host array would hold one copy per device; a split one holds a single copy.
    `spec` says what the devices of a replica split of the value on the devices.
    """

    topology: Topology
    memory_kind: str
    spec: Spec = None

    @functools.cached_property
    def _in_parts(self) -> NamedSharding:
        # On the mesh of all else: JAX names a result's sharding by the mesh of some argument.
        mesh = self.topology.mesh
        assert mesh is not None, "a host's memory is that of its devices"
        return NamedSharding(mesh, PartitionSpec(mesh.axis_names))

    @property
    def sharding(self) -> Sharding:
        """Split over the devices, in host memory."""
        return self._in_parts.with_memory_kind(self.memory_kind)

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value` flattened and padded, in host memory."""
        flat = jnp.asarray(value).reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % len(self.topology.devices)))
        split = lax.with_sharding_constraint(flat, self._in_parts)
        return transfer(split, self.sharding)

    @user_mesh.ignores_user_mesh
    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns the value [...], copied to each device."""
        flat = transfer(stored, self._in_parts)
        flat = lax.with_sharding_constraint(flat, self.topology.mirrored)
        size = int(np.prod(shape, dtype=int))
        # Constraints rather than device_puts: in a trace, device_put only names a memory space,
        # so a result equal to this value would come out split, and a stored one whole.
        value = flat[:size].reshape(shape)
        return lax.with_sharding_constraint(value, self.topology.within_replicas(self.spec))

    def unencoded(self, shape: tuple[int, ...]) -> HostShardedLayout | MirroredLayout:
        """Returns a host layout that keeps the shape; on the devices if R divides no axis."""
        axis = self.topology.find_axis(shape, free_axes(self.spec, shape))
        if axis is None:
            return MirroredLayout(self.topology, self.spec)
        return HostShardedLayout(self.topology, axis, self.memory_kind, self.spec)


def spec_of(layout: Layout) -> Spec:
    """Returns what a layout splits within a replica; None: what the program makes of it."""
    return getattr(layout, "spec", None)


def found_layout(layout: Layout, sharding: Sharding) -> Layout:
    """Returns a layout with the spec that a program has given the stored array, if it may."""
    if not isinstance(layout, (MirroredLayout, PartitionedLayout)) or layout.spec is not None:
        return layout
    found = spec_of_sharding(sharding, layout.topology)
    return layout if found is None else dataclasses.replace(layout, spec=found)


def in_force(layout: Layout | None) -> Any:
    """Returns the layout that stands in for one where other replicas do: mostly itself."""
    topology = getattr(layout, "topology", None)
    if layout is None or topology is None or (now := kinds.in_force(topology)) is topology:
        return layout
    if layout.kind == kinds.PER_REPLICA:
        return StackedLayout(now)
    if (
        isinstance(layout, PartitionedLayout)
        and layout.size is None
        and now.num_replicas == topology.num_replicas
    ):
        return PartitionedLayout(now, layout.axis)
    return MirroredLayout(now)


# -- who decides ---------------------------------------------------------------


class LaidOut(Protocol):
    """Anything with a variable's shape, dtype and layout."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def layout(self) -> Layout: ...


class Declared(LaidOut, Protocol):
    """A variable as far as it is known before it has a value."""

    name: str


class VariablePlacement(Protocol):
    """The part of a strategy that decides where its variables are stored.

    If `synchronizes`, sync-on-read variables have one component per replica, wherever
    the other variables live.
    """

    @property
    def synchronizes(self) -> bool:
        """Whether a variable's synchronization and aggregation have an effect."""
        ...

    def layout(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        colocate_with: LaidOut | None = None,
        spec: Spec = None,
    ) -> Layout:
        """Returns the layout of a new variable with a single value.

        A question, which changes nothing: it is also asked about variables that exist, such as
        those of Flax modules, and never about sync-on-read ones. What has to be remembered from
        one variable to the next is kept by a `create_variable` of one's own `StrategyExtended`.

        Args:
          shape: its shape.
          dtype: its dtype.
          colocate_with: the variable that it is colocated with, or None.
          spec: what the user wants split within a replica. Given only if that is not None: a
            placement without model axes needs no such argument.
        """
        ...

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns the layout of a value reduced to the devices of `variable`.

        Args:
          variable: the variable, or anything laid out like one.

        The reduced value keeps its shape, so only `unencoded` of the returned layout is used.
        """
        ...


def layout_by(
    placement: VariablePlacement,
    shape: tuple[int, ...],
    dtype: DTypeLike,
    colocate_with: LaidOut | None = None,
    spec: Spec = None,
) -> Layout:
    """Returns ``placement.layout(...)``; one without model axes need not know a spec."""
    if spec is None:
        return placement.layout(shape, dtype, colocate_with=colocate_with)
    return placement.layout(shape, dtype, colocate_with=colocate_with, spec=spec)


@dataclasses.dataclass(frozen=True)
class PlainPlacement:
    """One copy, without synchronization, on one device (None: the default device)."""

    device: jax.Device | None = None
    synchronizes: bool = False

    def layout(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        colocate_with: LaidOut | None = None,
        spec: Spec = None,
    ) -> Layout:
        return OneDeviceLayout(self.device)

    def reduction_layout(self, variable: LaidOut) -> Layout:
        return variable.layout


@dataclasses.dataclass(frozen=True)
class MirroredPlacement:
    """A copy on each replica."""

    topology: Topology
    synchronizes: bool = True

    def layout(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        colocate_with: LaidOut | None = None,
        spec: Spec = None,
    ) -> Layout:
        spec = spec_beside(colocate_with, shape) if spec is None else spec
        return MirroredLayout(self.topology, spec)

    def reduction_layout(self, variable: LaidOut) -> Layout:
        return MirroredLayout(self.topology, spec_of(variable.layout))


def spec_beside(owner: LaidOut | None, shape: tuple[int, ...]) -> Spec:
    """Returns what a slot of `owner` splits within a replica: the same if it has its shape."""
    if owner is None or tuple(owner.shape) != tuple(shape):
        return None
    return spec_of(owner.layout)
