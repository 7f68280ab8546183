"""Layouts of a user's own classes, and a strategy that places matrices by them, for tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import distjax as dj
from distjax.parts import WHOLE, MirroredLayout, Shards, Topology, mesh_topology


def negate(value):
    """Returns the negative, of truth values too."""
    return ~value if value.dtype == bool else -value


@dataclasses.dataclass(frozen=True)
class Flipped:
    """Whole on each replica, stored negated and transposed."""

    topology: Topology
    kind = "mirrored"
    local_form = WHOLE
    hands_out_copies = True

    @property
    def num_copies(self):
        return self.topology.num_replicas

    @property
    def sharding(self):
        return self.topology.mirrored

    def to_stored(self, value):
        return negate(jnp.asarray(value).T)

    def from_stored(self, stored, shape):
        return negate(stored.T)

    def constrain(self, stored):
        return lax.with_sharding_constraint(stored, self.sharding)

    def unencoded(self, shape):
        return MirroredLayout(self.topology)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Split over both axes of a matrix, stored as it is."""

    topology: Topology
    kind = "partitioned"
    num_copies = 1
    hands_out_copies = False

    @property
    def sharding(self):
        if self.topology.mesh is None:
            return self.topology.mirrored
        grid = np.reshape(self.topology.devices, (2, -1))
        mesh = Mesh(grid, ("rows", "columns"), axis_types=(AxisType.Auto,) * 2)
        return NamedSharding(mesh, PartitionSpec("rows", "columns"))

    @property
    def local_form(self):
        return Shards(self.topology, self.split, self.join, self.sharding)

    def split(self, value):
        (a, b), n = value.shape, self.topology.num_replicas // 2
        blocks = value.reshape(2, a // 2, n, b // n).transpose(0, 2, 1, 3)
        return blocks.reshape(2 * n, a // 2, b // n)

    def join(self, shards):
        (_, a, b), n = shards.shape, self.topology.num_replicas // 2
        return shards.reshape(2, n, a, b).transpose(0, 2, 1, 3).reshape(2 * a, n * b)

    def to_stored(self, value):
        return value

    def from_stored(self, stored, shape):
        return stored

    def constrain(self, stored):
        return lax.with_sharding_constraint(stored, self.sharding)

    def unencoded(self, shape):
        return self


@dataclasses.dataclass(frozen=True)
class StackedBlocks:
    """Split over both axes, stored negated and as [R, rows, columns]."""

    topology: Topology
    kind = "partitioned"
    num_copies = 1
    hands_out_copies = True

    @property
    def sharding(self):
        return self.topology.per_replica

    @property
    def local_form(self):
        blocks = Blocks(self.topology)
        return Shards(self.topology, blocks.split, blocks.join)

    def to_stored(self, value):
        return negate(Blocks(self.topology).split(jnp.asarray(value)))

    def from_stored(self, stored, shape):
        return negate(Blocks(self.topology).join(stored))

    def constrain(self, stored):
        return lax.with_sharding_constraint(stored, self.sharding)

    def unencoded(self, shape):
        return Blocks(self.topology)


LAYOUTS = {"flipped": Flipped, "blocks": Blocks, "stacked_blocks": StackedBlocks}


@dataclasses.dataclass(frozen=True)
class OwnPlacement:
    """Matrices of even sizes by a layout of one's own, the rest on each replica.

    Attributes:
      reduces_alike: whether what is reduced to a variable is laid out as the variable.
    """

    topology: Topology
    layout_class: type
    reduces_alike: bool
    synchronizes: bool = True

    def layout(self, shape, dtype, colocate_with=None):
        if colocate_with is not None and colocate_with.shape == shape:
            return colocate_with.layout
        sizes = 2, self.topology.num_replicas // 2
        if len(shape) == 2 and all(n % m == 0 for n, m in zip(shape, sizes, strict=True)):
            return self.layout_class(self.topology)
        return MirroredLayout(self.topology)

    def reduction_layout(self, variable):
        return variable.layout if self.reduces_alike else MirroredLayout(self.topology)


class OwnStrategy(dj.Strategy):
    """A strategy put together of parts, one of them the user's own."""

    def __init__(self, topology, layout_class, reduces_alike=True):
        placement = OwnPlacement(topology, layout_class, reduces_alike)
        super().__init__(dj.StrategyExtended(topology, placement))


def four_devices():
    """Returns a topology of four replicas, each on a device."""
    return mesh_topology(jax.devices()[:4], dj.REPLICA_AXIS)
