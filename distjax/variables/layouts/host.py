"""The layout of one value in host memory, stored flat."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from distjax import user_mesh
from distjax.placement import topology as kinds
from distjax.placement.topology import Topology
from distjax.placement.transfer import transfer
from distjax.variables.layouts.host_sharded import HostShardedLayout
from distjax.variables.layouts.local_form import WHOLE
from distjax.variables.layouts.mirrored import MirroredLayout


@dataclasses.dataclass(frozen=True)
class HostLayout:
    """One value in host memory, flattened, padded and split over the host's devices.

    A replicated host array would hold one copy per device; a split one holds a single copy.
    """

    topology: Topology
    memory_kind: str
    kind = kinds.HOST
    num_copies = 1
    local_form = WHOLE
    hands_out_copies = True

    def __str__(self) -> str:
        return "host memory"

    @functools.cached_property
    def _mesh(self) -> Mesh:
        devices = np.array(self.topology.devices, dtype=object)
        return Mesh(devices, ("part",), axis_types=(AxisType.Auto,))

    @property
    def sharding(self) -> Sharding:
        """Split over the devices, in host memory."""
        return NamedSharding(self._mesh, PartitionSpec("part"), memory_kind=self.memory_kind)

    def to_stored(self, value: jax.Array) -> Any:
        """Returns `value` flattened and padded, in host memory."""
        flat = jnp.asarray(value).reshape(-1)
        flat = jnp.pad(flat, (0, -flat.size % len(self.topology.devices)))
        split = lax.with_sharding_constraint(flat, NamedSharding(self._mesh, PartitionSpec("part")))
        return transfer(split, self.sharding)

    @user_mesh.ignores_user_mesh
    def from_stored(self, stored: jax.Array, shape: tuple[int, ...]) -> Any:
        """Returns the value [...], copied to each device."""
        flat = transfer(stored, NamedSharding(self._mesh, PartitionSpec("part")))
        flat = lax.with_sharding_constraint(flat, NamedSharding(self._mesh, PartitionSpec()))
        size = int(np.prod(shape, dtype=int))
        # Constraints rather than device_puts: in a trace, device_put only names a memory space,
        # so a result equal to this value would come out split, and a stored one whole.
        return lax.with_sharding_constraint(flat[:size].reshape(shape), self.topology.mirrored)

    def constrain(self, stored: jax.Array) -> Any:
        """Returns `stored`, which `to_stored` has already placed."""
        return stored

    def unencoded(self, shape: tuple[int, ...]) -> HostShardedLayout | MirroredLayout:
        """Returns a host layout that keeps the shape; on the devices if R divides no axis."""
        axis = self.topology.find_axis(shape)
        if axis is None:
            return MirroredLayout(self.topology)
        return HostShardedLayout(self.topology, axis, self.memory_kind)
