"""Places a plan's arrays on a worker's devices; arrays that are already there skip JAX."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from distjax import jax_compat
from distjax.jax_compat import ShapedArray
from distjax.placement.topology import Topology
from distjax.placement.transfer import transfer
from distjax.servers.elements import Argument, RemoteArray
from distjax.servers.plan import Plan, Stage


def place(arrays: Iterable[Argument], where: jax.Device | Sharding) -> list[jax.Array]:
    """Returns the arrays committed to `where`, so that a program's results stay there too.

    Numpy arrays are returned as they are: the program moves them to its other arguments.

    Args:
      arrays: from anywhere.
      where: a device, or a sharding over several.
    """
    return [_place(x, where) for x in arrays]  # type: ignore[misc]


def _place(array: Argument, where: jax.Device | Sharding) -> jax.Array | np.ndarray:
    if isinstance(array, RemoteArray):
        return np.asarray(array)
    if isinstance(array, np.ndarray) or (array.committed and array.device == where):
        return array
    return transfer(array, where if isinstance(where, Sharding) else SingleDeviceSharding(where))


def as_view(value: jax.Array) -> jax.Array | np.ndarray:
    """Returns a value's own memory, if numpy can view it; else a copy.

    `np.asarray` would be cached in the value, which could then never be donated again.
    """
    is_plain = not jax_compat.is_key_dtype(value.dtype) and value.dtype.kind in "fiuc"
    (device,) = value.devices()
    if not is_plain or device.platform != "cpu":
        return jnp.array(value, copy=True)
    memory: Any = value  # its type is unknown to numpy
    return np.from_dlpack(memory)


def struct_of(aval: ShapedArray, sharding: Sharding | None) -> jax.ShapeDtypeStruct:
    """Returns what stands for an array in a compilation."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def sharding_of(slot: int, plan: Plan, home: Topology) -> Sharding:
    """Returns the sharding with which a worker holds a slot of a plan."""
    return home.per_replica if slot in plan.varying else home.mirrored


def outs_of(stage: Stage, plan: Plan, home: Topology) -> tuple[Sharding, ...]:
    """Returns the shardings of the results, and of the token, of a stage's program."""
    return (*(sharding_of(slot, plan, home) for slot in stage.results), home.mirrored)
