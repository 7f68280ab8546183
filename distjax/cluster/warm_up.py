"""The first use of the groups of devices, while all processes are still together.

Gloo waits 30 seconds for the processes of a group that is used for the first time. After slow work
of one process (reading data, compiling) that is too short, so the groups are used at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def warm_up() -> None:
    """Uses the groups that every job has: all devices, and the first of each process."""
    devices = jax.devices()
    first = {device.process_index: device for device in reversed(devices)}
    _use(devices)
    _use([first[process] for process in sorted(first)])


def _use(devices: Sequence[jax.Device]) -> None:
    """Runs a collective over `devices`, which connects their processes."""
    mesh = jax.sharding.Mesh(np.array(devices), ("devices",))
    split = NamedSharding(mesh, PartitionSpec("devices"))
    ones = jax.make_array_from_callback((len(devices),), split, lambda _: np.ones(1, np.float32))
    total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))
    total(ones).block_until_ready()
