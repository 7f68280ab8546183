"""Destinations: targets of reduce_to and broadcast_to."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from distjax import jax_compat
from distjax.context.contracts import Destinations
from distjax.errors import LocalityError, describe_value, message
from distjax.placement.per_replica import PerReplica, require_same_topology
from distjax.placement.topology import Topology
from distjax.placement.transfer import require_held, transfer
from distjax.strategies.contracts import ExtendedContract
from distjax.typing import PyTree
from distjax.variables.layouts.layout import Layout
from distjax.variables.stored_variable import ExtendedForVariables
from distjax.variables.variable import Variable
from distjax.variables.variable_placement import LaidOut


def resolve(extended: ExtendedContract, destinations: Destinations, method: str) -> Sharding | None:
    """Returns the sharding that `destinations` stands for; None: any will do.

    Args:
      extended: that of the strategy.
      destinations: a variable, an array or PerReplica (its devices), a
        jax.Device or its name, a sequence of them, or None (all workers).
      method: the call's public name, for errors.

    Raises:
      ValueError: anything else, an empty sequence or string, or a device that is named twice.
      LocalityError: an unpickled PerReplica of another number of replicas.
    """
    topology = extended.topology
    if destinations is None:
        return topology.mirrored
    if isinstance(destinations, Variable):
        return reduction_layout(destinations.strategy.extended, destinations).sharding
    if isinstance(destinations, PerReplica):
        if not destinations.topology.is_placed:  # it was unpickled
            require_same_topology(destinations, topology, f"{method}: destinations")
        return destinations.topology.mirrored
    if isinstance(destinations, jax_compat.Tracer):
        return topology.mirrored
    if isinstance(destinations, jax.Array):
        on_all = destinations.sharding.device_set == set(topology.devices)
        return topology.mirrored if on_all else _over(sorted_devices(destinations), topology)
    if isinstance(destinations, (jax.Device, str)):
        destinations = [destinations]
    if isinstance(destinations, (tuple, list)) and destinations:
        devices = [_device(d, method) for d in destinations]
        _require_once(devices, method)
        return _over(devices, topology)
    raise ValueError(_text(method, destinations))


def reduction_layout(extended: ExtendedForVariables, variable: LaidOut) -> Layout:
    """Returns the unencoded layout of a value reduced to the devices of `variable`."""
    return extended.placement.reduction_layout(variable).unencoded(variable.shape)


def sorted_devices(array: jax.Array) -> list[jax.Device]:
    """Returns the devices of an array in order of their ids."""
    return sorted(array.sharding.device_set, key=lambda d: d.id)


def _device(item: object, method: str) -> jax.Device:
    if isinstance(item, jax.Device):
        return item
    if isinstance(item, str) and item:
        for device in jax.devices():
            if item.lower().lstrip("/") in (
                f"{device.platform}:{device.id}",
                f"device:{device.platform}:{device.id}",
            ):
                return device
    raise ValueError(_text(method, item))


def _require_once(devices: list[jax.Device], method: str) -> None:
    repeated = next((d for d in devices if devices.count(d) > 1), None)
    if repeated is None:
        return
    raise ValueError(
        message(
            f"{method}: destinations needs to name each device once",
            got=f"{repeated} {devices.count(repeated)} times",
            why="a device holds one copy of a value",
            fix=f"{method}(..., destinations=list(dict.fromkeys(devices)))",
        )
    )


def _over(devices: list[jax.Device], topology: Topology) -> Sharding:
    if tuple(devices) == topology.devices:
        return topology.mirrored
    elsewhere = [d for d in devices if topology.spans_processes and not _is_here(d)]
    if elsewhere:
        raise LocalityError(_elsewhere_text(elsewhere[0]))
    if len(devices) == 1:
        return jax.sharding.SingleDeviceSharding(devices[0])
    mesh = Mesh(np.array(devices, dtype=object), ("copy",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec())


def _is_here(device: jax.Device) -> bool:
    return device.process_index == jax.process_index()


def _elsewhere_text(device: jax.Device) -> str:
    return message(
        "a destination needs devices of this process, or all devices of the strategy",
        got=f"{device} of process {device.process_index}, in process {jax.process_index()}",
        why="nothing is sent to single devices of other processes",
        fix="destinations=None for all devices; or jax.local_devices()[0] on each process",
    )


def place_on(value: PyTree, target: Sharding | None) -> Any:
    """Returns `value` at `target`; traced values are placed where they are used."""
    if target is None or isinstance(value, jax_compat.Tracer):
        return value
    if not isinstance(value, jax.Array):
        require_held(value, "a value for destinations")
        return transfer(value, target) if hasattr(value, "dtype") else value
    is_there = value.committed and value.sharding == target
    return value if is_there else transfer(value, target)


def _text(method: str, destinations: object) -> str:
    return message(
        f"{method}: destinations can not be empty and needs a variable, an array, a PerReplica, a "
        "jax.Device, a sequence of devices, or None",
        got=describe_value(destinations),
        why="it says on which devices the result is needed",
        fix=f"{method}(..., destinations=v) for a variable v; None for all workers",
    )
