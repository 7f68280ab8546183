"""How a variable's value is stored: which array, on which devices.

A variable has up to three forms: *stored* (the array that lives between steps),
*global* (what cross-replica code works on: [...], or [R, ...] with a component
per replica), and *local* (what one replica holds of it). A layout says how they
come from each other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from distjax import jax_compat
from distjax.placement import locality as kinds
from distjax.placement.topology import Topology


class Layout(Protocol):
    """The form of a variable's storage."""

    @property
    def kind(self) -> str:
        """The kind of the variable's Locality."""
        ...

    @property
    def num_copies(self) -> int:
        """How many copies `update` and `local_results` speak of."""
        ...

    @property
    def sharding(self) -> Sharding | None:
        """Where the stored array lives; None: JAX's default device."""
        ...

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the global form of a value of `shape`."""
        ...

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what one replica holds."""
        ...

    def to_stored(self, value: Any) -> Any:
        """Returns the stored form of a global value."""
        ...

    def from_stored(self, stored: Any, shape: tuple[int, ...]) -> Any:
        """Returns the global value of a stored form."""
        ...


@dataclasses.dataclass(frozen=True)
class DirectLayout:
    """An array that is stored as it is: the global form is the stored one.

    Attributes:
      sharding: where it lives; None: JAX's default device.
      num_copies: how many copies `update` and `local_results` speak of.
      kind: the kind of the variable's Locality.
      lead: what the global shape has before the variable's own: (R,) for components.
    """

    sharding: Sharding | None
    num_copies: int = 1
    kind: str = kinds.MIRRORED
    lead: tuple[int, ...] = ()

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`, [R, *shape] for components."""
        return (*self.lead, *shape)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`."""
        return shape

    def to_stored(self, value: Any) -> Any:
        """Returns `value`."""
        return value

    def from_stored(self, stored: Any, shape: tuple[int, ...]) -> Any:
        """Returns `stored`."""
        return stored


def mirrored_layout(topology: Topology) -> DirectLayout:
    """Returns the layout of one value [...] with a copy on each replica: `P()`."""
    return DirectLayout(topology.mirrored, topology.num_replicas)


def stacked_layout(topology: Topology) -> DirectLayout:
    """Returns the layout of a component per replica, [R, ...]: `P(replica)`."""
    count = topology.num_replicas
    return DirectLayout(topology.per_replica, count, kinds.PER_REPLICA, (count,))


@dataclasses.dataclass(frozen=True)
class PartitionedLayout:
    """One value [...], split over the replicas along `axis`; a replica holds a shard."""

    topology: Topology
    axis: int
    num_copies: int = 1
    kind: str = kinds.PARTITIONED

    @property
    def sharding(self) -> Sharding:
        """`P(..., replica)` with the replica axis at `axis`."""
        if self.topology.mesh is None:
            return self.topology.mirrored
        spec = PartitionSpec(*(None,) * self.axis, self.topology.axis_name)
        return NamedSharding(self.topology.mesh, spec)

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`."""
        return shape

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one shard."""
        size = shape[self.axis] // self.topology.num_replicas
        return (*shape[: self.axis], size, *shape[self.axis + 1 :])

    def to_stored(self, value: Any) -> Any:
        """Returns `value`."""
        return value

    def from_stored(self, stored: Any, shape: tuple[int, ...]) -> Any:
        """Returns `stored`."""
        return stored

    def stack(self, value: jax.Array) -> jax.Array:
        """Returns the shards of a global value as [R, ...]: nothing is moved."""
        count = self.topology.num_replicas
        shape = value.shape
        split = (*shape[: self.axis], count, shape[self.axis] // count, *shape[self.axis + 1 :])
        return jnp.moveaxis(value.reshape(split), self.axis, 0)

    def join(self, shards: jax.Array) -> jax.Array:
        """Returns the global value of shards [R, ...]: nothing is moved."""
        split = jnp.moveaxis(shards, 0, self.axis)
        shape = split.shape
        whole = shape[self.axis] * shape[self.axis + 1]
        joined = split.reshape(*shape[: self.axis], whole, *shape[self.axis + 2 :])
        if self.topology.mesh is None:
            return joined
        return lax.with_sharding_constraint(joined, self.sharding)

    def gather(self, shard: jax.Array) -> jax.Array:
        """Returns the whole value, in the replica view, from one's own shard."""
        return lax.all_gather(shard, self.topology.axis_name, axis=self.axis, tiled=True)

    def scatter_sum(self, value: jax.Array) -> jax.Array:
        """Returns one's own shard of the sum of the replicas' values [...]."""
        if value.dtype == jnp.bool_:  # a psum counts them as int32, this would refuse them
            value = value.astype(jnp.int32)
        return lax.psum_scatter(
            value, self.topology.axis_name, scatter_dimension=self.axis, tiled=True
        )

    def own_shard(self, value: jax.Array) -> jax.Array:
        """Returns one's own shard of a value that is equal on every replica."""
        size = value.shape[self.axis] // self.topology.num_replicas
        start = lax.axis_index(self.topology.axis_name) * size
        return lax.dynamic_slice_in_dim(value, start, size, self.axis)


@dataclasses.dataclass(frozen=True)
class HostLayout:
    """One value in host memory, flattened, padded and split over the host's devices.

    A replicated host array would hold a copy per device; so the host holds one.
    """

    topology: Topology
    memory_kind: str
    num_copies: int = 1
    kind: str = kinds.HOST

    @functools.cached_property
    def _mesh(self) -> Mesh:
        devices = np.array(self.topology.devices, dtype=object)
        return Mesh(devices, ("part",), axis_types=(AxisType.Auto,))

    @property
    def sharding(self) -> Sharding:
        """Split over the devices, in host memory."""
        return NamedSharding(self._mesh, PartitionSpec("part"), memory_kind=self.memory_kind)

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`."""
        return shape

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`."""
        return shape

    def to_stored(self, value: Any) -> Any:
        """Returns `value` flattened and padded, in host memory."""
        flat = jnp.asarray(value).reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % len(self.topology.devices)))
        split = lax.with_sharding_constraint(flat, NamedSharding(self._mesh, PartitionSpec("part")))
        return jax.device_put(split, self.sharding)

    @jax_compat.ignores_user_mesh
    def from_stored(self, stored: Any, shape: tuple[int, ...]) -> Any:
        """Returns the value [...], copied to each device."""
        flat = jax.device_put(stored, NamedSharding(self._mesh, PartitionSpec("part")))
        flat = lax.with_sharding_constraint(flat, NamedSharding(self._mesh, PartitionSpec()))
        size = int(np.prod(shape, dtype=int))
        # Constraints, not device_puts: in a trace those only name a memory, and a result that is
        # this value would come out split, as would what is stored come out whole.
        return lax.with_sharding_constraint(flat[:size].reshape(shape), self.topology.mirrored)
