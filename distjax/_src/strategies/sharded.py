"""The strategies that keep variables elsewhere than on every replica.

`ShardedStrategy` splits training state over the replicas (ZeRO 1, 2 and 3);
`CentralStorageStrategy` keeps one copy of each variable in host memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from distjax._src import jax_compat
from distjax._src.collectives.reductions import CommunicationOptions
from distjax._src.placement import (
    REPLICA_AXIS,
    Spec,
    Topology,
    devices_or_all,
    free_axes,
    mesh_topology,
)
from distjax._src.strategies.extended import StrategyExtended
from distjax._src.strategies.strategy import Strategy
from distjax._src.tables import format_bytes
from distjax._src.typing import DTypeLike
from distjax._src.variables.layouts import (
    HostLayout,
    LaidOut,
    Layout,
    MirroredLayout,
    spec_beside,
    spec_of,
    split_along,
)
from distjax._src.variables.partitioners import Partitioner, count_shards, require_partitioner
from distjax.errors import describe_value, message, require_int

#: What is split, for ZeRO stages 1 to 3. Each includes those before it.
PARTITIONS = ("optimizer", "gradients", "parameters")

#: What stays whole on each replica by default.
MIN_SPLIT_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True)
class ShardedPlacement:
    """Splits variables over the replicas: along an axis that R divides, or padded.

    Attributes:
      topology: the replicas.
      partition: what is split: "optimizer" (variables colocated with another),
        "gradients" (values reduced to a variable, too) or "parameters" (all).
      partitioner: the number of shards per axis; a variable that it leaves whole stays
        mirrored.
      min_split_bytes: smaller variables stay mirrored, and what belongs to them.
    """

    topology: Topology
    partition: str
    partitioner: Partitioner | None
    min_split_bytes: int = 0
    synchronizes: bool = True

    def over(self, topology: Topology) -> ShardedPlacement:
        """Returns the same for other replicas."""
        return dataclasses.replace(self, topology=topology)

    def layout(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        colocate_with: LaidOut | None = None,
        spec: Spec = None,
    ) -> Layout:
        """Returns the split layout if this kind of variable is split."""
        spec = spec_beside(colocate_with, shape) if spec is None else spec
        if colocate_with is None and self.partition != "parameters":
            return MirroredLayout(self.topology, spec)
        return self._split_layout(shape, dtype, spec, colocate_with)

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns the split layout of a gradient, from stage 2 on."""
        spec = spec_of(variable.layout)
        if self.partition == "optimizer":
            return MirroredLayout(self.topology, spec)
        return self._split_layout(variable.shape, variable.dtype, spec)

    def _split_layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, spec: Spec, owner: LaidOut | None = None
    ) -> Layout:
        whole = MirroredLayout(self.topology, spec)
        if jax_compat.is_key_dtype(dtype) or self.topology.num_replicas == 1:
            return whole
        axes = free_axes(spec, shape)
        if self.partitioner is not None:
            shards = count_shards("ShardedStrategy", self.partitioner, shape, dtype)
            axes = [i for i in axes if shards[i] > 1]
        layout = split_along(self.topology, shape, axes, spec)
        if layout is None:
            is_taken = bool(shape) and not free_axes(spec, shape)
            why = "the model axes have all of its axes" if is_taken else ""
            return dataclasses.replace(whole, why=why)
        itemsize = jnp.dtype(dtype).itemsize
        if owner is not None and tuple(owner.shape) == tuple(shape):
            itemsize = max(itemsize, jnp.dtype(owner.dtype).itemsize)  # a narrow slot goes with it
        if math.prod(shape) * itemsize <= self.min_split_bytes:
            why = f"not over {format_bytes(self.min_split_bytes)}"
            return dataclasses.replace(whole, why=why)
        return layout


class ShardedStrategy(Strategy):
    """A replica per device, with the training state split over the replicas.

    Args:
      devices: the D devices; default, or if empty: all of the job.
      partition: "optimizer" (ZeRO-1: variables colocated with another, such as
        Adam's moments), "gradients" (ZeRO-2: values reduced to a variable arrive
        split, by a reduce-scatter) or "parameters" (ZeRO-3: all variables are
        split, and gathered where a replica reads them).
      partitioner: `FixedShards`, `MinSize` or `MaxSize` of `dj.parts`, or a function
        of shape and dtype: which axis to split, if any. Default: the first axis
        that R divides, or else the one that needs the least padding.
      min_split_bytes: variables of up to so many bytes stay whole on each replica, with their
        slots and gradients: to gather one takes longer than its memory is worth. 0 splits all
        that have an axis. None: 64 KiB; 0 with a `partitioner`, which decides.
      axis_name: the name of the replica axis inside `run`.
      model_axes: sizes of axes within one replica, as in `MirroredStrategy`. What a variable's
        `sharding` splits over them is split besides; over the replicas is an axis that it
        leaves free.
      communication: how reductions to whole values are carried out.

    Raises:
      ValueError: an unknown partition, a size below 0, or axes that do not fit. TypeError: a
        partitioner that is not a function.

    Locality: split variables are `P(..., replica)` on one axis; those up to `min_split_bytes`
      stay mirrored. Where R does not divide the axis, the stored array ends in zeros, which
      nobody sees: `v.value` outside of programs is then a copy, whole on each replica.
    Cost: a gather per variable that a replica function reads (one more where
      `jax.checkpoint` rereads it), a reduce-scatter per gradient.

    Example:
      >>> strategy = dj.ShardedStrategy(jax.devices()[:2], partition="parameters")
      >>> with strategy.scope():
      ...     w, b = dj.Variable(jnp.zeros((400, 300))), dj.Variable(jnp.zeros(300))
      >>> dj.locality(w).kind, w.value.addressable_shards[0].data.shape
      ('partitioned', (200, 300))
      >>> dj.locality(b).kind
      'mirrored'

    Source: ZeRO (Rajbhandari et al., 2020); TensorFlow's partitioned variables.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        partition: str = "optimizer",
        partitioner: Partitioner | None = None,
        min_split_bytes: int | None = None,
        axis_name: str = REPLICA_AXIS,
        model_axes: Mapping[str, int] | None = None,
        communication: CommunicationOptions | None = None,
    ):
        if partition not in PARTITIONS:
            raise ValueError(
                message(
                    f"ShardedStrategy: partition needs one of {', '.join(PARTITIONS)}",
                    got=describe_value(partition),
                    why="it says what is split over the replicas: ZeRO stage 1, 2 or 3",
                    fix="dj.ShardedStrategy(partition='parameters')",
                )
            )
        require_partitioner("ShardedStrategy", partitioner)
        topology = mesh_topology(devices_or_all(devices, "ShardedStrategy"), axis_name, model_axes)
        if min_split_bytes is None:
            min_split_bytes = MIN_SPLIT_BYTES if partitioner is None else 0
        require_int(
            "ShardedStrategy: min_split_bytes",
            min_split_bytes,
            0,
            why="variables of up to so many bytes stay whole",
            fix="dj.ShardedStrategy(min_split_bytes=0) splits all",
        )
        placement = ShardedPlacement(topology, partition, partitioner, min_split_bytes)
        super().__init__(StrategyExtended(topology, placement, communication=communication))


@dataclasses.dataclass(frozen=True)
class CentralStoragePlacement:
    """One copy of each variable in host memory."""

    topology: Topology
    memory_kind: str
    synchronizes: bool = True

    def layout(
        self,
        shape: tuple[int, ...],
        dtype: DTypeLike,
        colocate_with: LaidOut | None = None,
        spec: Spec = None,
    ) -> Layout:
        """Returns the host layout; PRNG keys and empty arrays stay on the devices."""
        spec = spec_beside(colocate_with, shape) if spec is None else spec
        if jax_compat.is_key_dtype(dtype) or 0 in shape:
            return MirroredLayout(self.topology, spec)
        return HostLayout(self.topology, self.memory_kind, spec)

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns the layout of a value on the devices, where updates run."""
        return MirroredLayout(self.topology, spec_of(variable.layout))


class CentralStorageStrategy(Strategy):
    """A replica per device; one copy of each variable, in host memory.

    A step copies the variables it reads to the devices, reduces the gradients and
    copies the new values back. For models whose state does not fit on a device
    beside its activations.

    Args:
      devices: the D devices; default, or if empty: all of the job.
      parameter_memory: the memory kind of the storage.
      axis_name: the name of the replica axis inside `run`.
      model_axes: sizes of axes within one replica, as in `MirroredStrategy`: what a variable's
        `sharding` splits over them is split on the devices.

    Raises:
      ValueError: the devices lack that kind of memory.

    Locality: stored flat, padded and split over the host's devices, so that the
      host holds one copy; `v.value` outside a trace is a copy on the devices.

    Source: tf.distribute.experimental.CentralStorageStrategy.
    """

    def __init__(
        self,
        devices: Sequence[jax.Device] | None = None,
        *,
        parameter_memory: str = "pinned_host",
        axis_name: str = REPLICA_AXIS,
        model_axes: Mapping[str, int] | None = None,
    ):
        devices = devices_or_all(devices, "CentralStorageStrategy")
        topology = mesh_topology(devices, axis_name, model_axes)
        known = sorted(m.kind for m in topology.devices[0].addressable_memories())
        if parameter_memory not in known:
            raise ValueError(
                message(
                    f"CentralStorageStrategy: parameter_memory needs one of {', '.join(known)}",
                    got=describe_value(parameter_memory),
                    why="these are the memories that the devices can address",
                    fix="dj.CentralStorageStrategy(parameter_memory='pinned_host')",
                )
            )
        placement = CentralStoragePlacement(topology, parameter_memory)
        super().__init__(StrategyExtended(topology, placement))
