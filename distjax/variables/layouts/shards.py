"""The local forms of split values, of which each replica holds a shard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from distjax.collectives.ops import as_summand, from_total
from distjax.modes import ReduceOp
from distjax.placement.topology import Topology

_METHOD = "a reduction to shards"


@dataclasses.dataclass(frozen=True)
class AxisShards:
    """The local form of a value split into R equal parts along `axis`.

    Attributes:
      topology: the R replicas.
      axis: an axis whose size is divisible by R.
    """

    topology: Topology
    axis: int
    varying = True
    is_split = True

    @property
    def sharding(self) -> Sharding:
        """`P(..., replica)` with the replica axis at `axis`."""
        return self.topology.split_along(self.axis)

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`."""
        return shape

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one shard."""
        size = shape[self.axis] // self.topology.num_replicas
        return (*shape[: self.axis], size, *shape[self.axis + 1 :])

    def to_replicas(self, value: jax.Array) -> jax.Array:
        """Returns the shards of a value as [R, ...]; no data moves."""
        count = self.topology.num_replicas
        shape = value.shape
        split = (*shape[: self.axis], count, shape[self.axis] // count, *shape[self.axis + 1 :])
        return jnp.moveaxis(value.reshape(split), self.axis, 0)

    def from_replicas(self, array: jax.Array) -> jax.Array:
        """Returns the value from its shards [R, ...]; no data moves."""
        split = jnp.moveaxis(array, 0, self.axis)
        shape = split.shape
        whole = shape[self.axis] * shape[self.axis + 1]
        return self.spread(split.reshape(*shape[: self.axis], whole, *shape[self.axis + 2 :]))

    def spread(self, value: jax.Array) -> jax.Array:
        """Returns `value` constrained so that each device computes its shard."""
        if self.topology.mesh is None:
            return value
        return lax.with_sharding_constraint(value, self.sharding)

    def gather(self, local: jax.Array) -> jax.Array:
        """Returns the whole value, by an all-gather."""
        return lax.all_gather(local, self.topology.axis_name, axis=self.axis, tiled=True)

    def own_part(self, value: jax.Array) -> jax.Array:
        """Returns this replica's shard."""
        size = value.shape[self.axis] // self.topology.num_replicas
        start = lax.axis_index(self.topology.axis_name) * size
        return lax.dynamic_slice_in_dim(value, start, size, self.axis)

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> jax.Array:
        """Returns this replica's shard of the sum or mean, by a reduce-scatter."""
        summand = as_summand(op, value, _METHOD)
        total = lax.psum_scatter(
            summand, topology.axis_name, scatter_dimension=self.axis, tiled=True
        )
        return from_total(op, total, topology.num_replicas)

    def unstack(
        self, local: jax.Array, shape: tuple[int, ...]
    ) -> tuple[jax.Array, AxisShards] | None:
        """Returns the slices' shards, split along one of the slices' own axes."""
        if self.axis > 0:
            return local, AxisShards(self.topology, self.axis - 1)
        axis = self.topology.find_axis(shape, range(1, len(shape)))
        if axis is None:
            return None
        # Each replica holds whole slices: exchange them for a part of every slice.
        parts = lax.all_to_all(
            local, self.topology.axis_name, split_axis=axis, concat_axis=0, tiled=True
        )
        return parts, AxisShards(self.topology, axis - 1)


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
        """Returns `shape`."""
        return shape

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of one shard."""
        value = jax.ShapeDtypeStruct(shape, jnp.float32)
        return tuple(jax.eval_shape(self.split, value).shape[1:])

    def to_replicas(self, value: jax.Array) -> Any:
        """Returns ``split(value)``."""
        return self.split(value)

    def from_replicas(self, array: jax.Array) -> Any:
        """Returns ``join(array)``."""
        return self.spread(self.join(array))

    def spread(self, value: jax.Array) -> Any:
        """Returns `value`, constrained to `sharding` if there is one."""
        return (
            value if self.sharding is None else lax.with_sharding_constraint(value, self.sharding)
        )

    def gather(self, local: jax.Array) -> Any:
        """Returns the whole value, by an all-gather."""
        return self.join(lax.all_gather(local, self.topology.axis_name))

    def own_part(self, value: jax.Array) -> Any:
        """Returns this replica's shard."""
        own = lax.axis_index(self.topology.axis_name)
        return lax.dynamic_index_in_dim(self.split(value), own, keepdims=False)

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> jax.Array:
        """Returns this replica's shard of the sum or mean, by a reduce-scatter."""
        summand = as_summand(op, value, _METHOD)
        total = lax.psum_scatter(self.split(summand), topology.axis_name)
        return from_total(op, total, topology.num_replicas)

    def unstack(self, local: jax.Array, shape: tuple[int, ...]) -> None:
        """Returns None: how `split` acts on slices is unknown."""
        return None
