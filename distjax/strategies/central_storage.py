"""CentralStorageStrategy: one copy of each variable, in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from distjax import jax_compat
from distjax.errors import describe_value, message
from distjax.placement.topology import REPLICA_AXIS, Topology, mesh_topology
from distjax.strategies.extended import StrategyExtended
from distjax.strategies.job_devices import devices_of_job
from distjax.strategies.strategy import Strategy
from distjax.typing import DTypeLike
from distjax.variables.layouts import HostLayout, LaidOut, Layout, MirroredLayout


@dataclasses.dataclass(frozen=True)
class CentralStoragePlacement:
    """One copy of each variable in host memory."""

    topology: Topology
    memory_kind: str
    synchronizes: bool = True

    def layout(
        self, shape: tuple[int, ...], dtype: DTypeLike, colocate_with: LaidOut | None = None
    ) -> Layout:
        """Returns the host layout; PRNG keys and empty arrays stay on the devices."""
        if jax_compat.is_key_dtype(dtype) or 0 in shape:
            return MirroredLayout(self.topology)
        return HostLayout(self.topology, self.memory_kind)

    def reduction_layout(self, variable: LaidOut) -> Layout:
        """Returns the layout of a value on the devices, where updates run."""
        return MirroredLayout(self.topology)


class CentralStorageStrategy(Strategy):
    """A replica per device; one copy of each variable, in host memory.

    A step copies the variables it reads to the devices, reduces the gradients and
    copies the new values back. For models whose state does not fit on a device
    beside its activations.

    Args:
      devices: the D devices; default, or if empty: all of the job.
      parameter_memory: the memory kind of the storage.
      axis_name: the name of the replica axis inside `run`.

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
    ):
        topology = mesh_topology(devices_of_job(devices, "CentralStorageStrategy"), axis_name)
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
