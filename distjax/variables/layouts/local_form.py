"""LocalForm: what one replica holds of a value, and the form of unsplit values."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from distjax.collectives.ops import all_reduce
from distjax.modes import ReduceOp
from distjax.placement.topology import Topology


class LocalForm(Protocol):
    """How the local form of a value and its global form convert to each other.

    The built-in layouts use `UnsplitForm`, `AxisShards` and `Shards`; custom classes work
    as well.
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

    def unstack(self, local: jax.Array, shape: tuple[int, ...]) -> tuple[Any, LocalForm] | None:
        """Returns this replica's parts of the slices ``value[i]``, stacked, and their form.

        A loop over i can then gather one slice at a time. None if that is impossible; the
        loop then gathers the whole value before it starts.
        """
        ...


@dataclasses.dataclass(frozen=True)
class UnsplitForm:
    """Each replica holds everything it reads: the value, or its own component.

    Args:
      num_components: R if the global form is [R, ...]; None for a single value.
    """

    num_components: int | None
    is_split = False

    @property
    def varying(self) -> bool:
        """Whether each replica has its own component."""
        return self.num_components is not None

    def global_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `shape`, or [R, *shape]."""
        return shape if self.num_components is None else (self.num_components, *shape)

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
        """Returns None: nothing needs gathering."""
        return None


#: The form of a value that every replica holds whole.
WHOLE = UnsplitForm(None)
