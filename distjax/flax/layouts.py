"""Where the arrays of Flax variables live between steps: by strategy and rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Sharding

from distjax.flax import rules
from distjax.placement import locality as kinds
from distjax.placement.per_replica import PerReplica
from distjax.placement.topology import Topology
from distjax.replica.output_layout import AlreadyPlaced, place_output
from distjax.variables.layout import (
    DirectLayout,
    HostLayout,
    Layout,
    PartitionedLayout,
    mirrored_layout,
)


@dataclasses.dataclass(frozen=True)
class HostShardedLayout:
    """One value [...] in host memory, split along `axis` over the host's devices.

    A Flax variable keeps its shape wherever it lives, so it is not stored flat as
    distjax's own host variables are.
    """

    topology: Topology
    axis: int
    memory_kind: str
    kind: str = kinds.HOST

    @property
    def sharding(self) -> Sharding:
        """Split along the axis, in host memory."""
        return self._on_devices.with_memory_kind(self.memory_kind)

    @property
    def _on_devices(self) -> Any:
        return PartitionedLayout(self.topology, self.axis).sharding

    def to_stored(self, value: Any) -> Any:
        """Returns `value` in host memory."""
        return jax.device_put(jax.device_put(value, self._on_devices), self.sharding)

    def from_stored(self, stored: Any) -> Any:
        """Returns the value, copied to each device."""
        return jax.device_put(jax.device_put(stored, self._on_devices), self.topology.mirrored)


ArrayLayout = DirectLayout | PartitionedLayout | HostShardedLayout


def layout_of(strategy: Any, variable: Any, shape: Any, dtype: Any) -> ArrayLayout | None:
    """Returns where an array of a variable lives under `strategy`.

    Parameters live where the strategy puts variables, optimizer state where it puts
    variables colocated with others, everything else on each replica. None: anywhere.
    """
    if strategy is None:
        return None
    extended = strategy.extended
    if not extended.placement.synchronizes:
        return extended.placement.layout(shape, dtype)
    if not (rules.is_parameter(variable) or rules.is_slot_state(variable)):
        return mirrored_layout(extended.topology)
    colocate_with = variable if rules.is_slot_state(variable) else None
    return _in_shape(extended.placement.layout(tuple(shape), dtype, colocate_with), tuple(shape))


def _in_shape(layout: Layout, shape: tuple[int, ...]) -> ArrayLayout:
    """Returns a layout that keeps the shape; sizes that do not divide stay on the devices."""
    if not isinstance(layout, HostLayout):
        assert isinstance(layout, (DirectLayout, PartitionedLayout))
        return layout
    count = layout.topology.num_replicas
    axis = next((i for i, size in enumerate(shape) if size and size % count == 0), None)
    if axis is None:
        return mirrored_layout(layout.topology)
    return HostShardedLayout(layout.topology, axis, layout.memory_kind)


def place_array(value: Any, layout: ArrayLayout | None) -> Any:
    """Returns an array moved to where it lives, outside of traces; itself if it is there."""
    if layout is None or layout.sharding is None or isinstance(value, PerReplica):
        return value
    if isinstance(value, jax.Array) and value.sharding == layout.sharding:
        return value
    return jax.device_put(jnp.asarray(value), layout.sharding)


def as_value(stored: Any, layout: ArrayLayout | None) -> Any:
    """Returns the global value of a stored array, in a trace."""
    return layout.from_stored(stored) if isinstance(layout, HostShardedLayout) else stored


def as_argument(stored: Any, layout: ArrayLayout | None) -> Any:
    """Returns a stored array as what `run` takes: a partitioned one as the replicas' shards."""
    if isinstance(layout, PartitionedLayout):
        return PerReplica(layout.stack(stored), layout.topology)
    return as_value(stored, layout)


def as_stored_output(value: Any, layout: ArrayLayout | None, topology: Topology) -> Any:
    """Returns a global value as it is stored, in a trace."""
    if isinstance(value, PerReplica):
        return value
    if isinstance(layout, HostShardedLayout):
        return AlreadyPlaced(layout.to_stored(value))
    if isinstance(layout, PartitionedLayout):
        return AlreadyPlaced(lax.with_sharding_constraint(value, layout.sharding))
    return AlreadyPlaced(value if layout is None else place_output(value, topology))
