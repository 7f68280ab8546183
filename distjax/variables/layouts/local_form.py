"""What one replica holds of a value: all of it, or a component of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from distjax.collectives.ops import all_reduce
from distjax.modes import ReduceOp
from distjax.placement.topology import Topology


class LocalForm(Protocol):
    """How the local form of a value and its global form come from each other.

    `WHOLE`, `Components`, `AxisShards` and `Shards` are all there is need of; a class
    of one's own works as well.
    """

    @property
    def varying(self) -> bool:
        """Whether the replicas hold different arrays: shards, or components."""
        ...

    @property
    def is_split(self) -> bool:
        """Whether a replica holds a shard, and gathers the value where it reads it."""
        ...

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the global form of a value of `shape`."""
        ...

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of what one replica holds of a value of `shape`."""
        ...

    # In the global view.

    def to_replicas(self, value: jax.Array) -> Any:
        """Returns what the replicas hold of a global value: [R, ...] if `varying`."""
        ...

    def from_replicas(self, array: jax.Array) -> Any:
        """Returns the global value of what the replicas hold: [R, ...] if `varying`."""
        ...

    def spread(self, value: jax.Array) -> Any:
        """Returns a global value [...], in a trace, to be computed shard by shard."""
        ...

    # In the replica view.

    def gather(self, local: jax.Array) -> Any:
        """Returns the value that a replica reads, from what it holds."""
        ...

    def own_part(self, value: jax.Array) -> Any:
        """Returns what this replica holds of a value [...] that is equal on every one."""
        ...

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> Any:
        """Returns what this replica holds of the sum or mean of the replicas' values [...]."""
        ...

    def unstack(self, local: jax.Array, shape: tuple[int, ...]) -> tuple[Any, LocalForm] | None:
        """Returns what this replica holds of all slices ``value[i]``, and in which form.

        Stacked over i, for a loop that gathers one slice at a time. None: it cannot; the
        loop then gathers the whole value before it starts.
        """
        ...


@dataclasses.dataclass(frozen=True)
class WholeForm:
    """Each replica holds the value: there is nothing to be brought together."""

    varying = False
    is_split = False

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`."""
        return shape

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`."""
        return shape

    def to_replicas(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def from_replicas(self, array: jax.Array) -> Any:
        """Returns `array`."""
        return array

    def spread(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def gather(self, local: jax.Array) -> Any:
        """Returns `local`."""
        return local

    def own_part(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> jax.Array:
        """Returns the sum or mean, by an all-reduce."""
        return all_reduce(op, value, topology.axis_name, topology.num_replicas)

    def unstack(self, local: jax.Array, shape: tuple[int, ...]) -> None:
        """Returns None: the slices are there."""
        return None


#: The form of a value that each replica holds.
WHOLE = WholeForm()


@dataclasses.dataclass(frozen=True)
class Components:
    """Each replica holds a component of its own; the global form is [R, ...]."""

    num_replicas: int
    varying = True
    is_split = False

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns [R, *shape]."""
        return (self.num_replicas, *shape)

    def local_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`."""
        return shape

    def to_replicas(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def from_replicas(self, array: jax.Array) -> Any:
        """Returns `array`."""
        return array

    def spread(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def gather(self, local: jax.Array) -> Any:
        """Returns `local`: a replica reads its own component."""
        return local

    def own_part(self, value: jax.Array) -> Any:
        """Returns `value`."""
        return value

    def reduce(self, op: ReduceOp, value: jax.Array, topology: Topology) -> jax.Array:
        """Returns the sum or mean, by an all-reduce."""
        return all_reduce(op, value, topology.axis_name, topology.num_replicas)

    def unstack(self, local: jax.Array, shape: tuple[int, ...]) -> None:
        """Returns None: the slices are there."""
        return None
