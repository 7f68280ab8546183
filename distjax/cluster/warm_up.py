"""The first use of the groups of devices, while all processes are still together.

Gloo waits 30 seconds for the processes of a group that is used for the first time. After slow work
of one process (reading data, compiling) that is too short, so the groups are used at once.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distjax.cluster.agreement import agree
from distjax.cluster.facts import Fact

_used: set[frozenset[frozenset[jax.Device]]] = set()


def warm_up() -> None:
    """Uses the groups that every job has: all devices, and the first of each process."""
    devices = jax.devices()
    first = {device.process_index: device for device in reversed(devices)}
    _use(np.array([devices]))
    _use(np.array([[first[process] for process in sorted(first)]]))


def warm_up_groups(groups: np.ndarray) -> None:
    """Uses groups of devices, each for itself; a meeting of all processes where they are new.

    Args:
      groups: devices [G, n], some of each process; a group may lie in one.

    Raises:
      AgreementError: another process has other groups, or does something else.
      StuckError, PeerLostError: a process does not come.
    """
    spans_processes = any(len({d.process_index for d in group}) > 1 for group in groups)
    if not spans_processes or _as_sets(groups) in _used:
        return
    text = str([[device.id for device in group] for group in groups])
    fact = Fact("the groups of devices of a strategy", text)
    agree("the construction of a strategy", [fact], known_by=[fact])
    _use(groups)


def _as_sets(groups: np.ndarray) -> frozenset[frozenset[jax.Device]]:
    return frozenset(map(frozenset, groups.tolist()))


def _use(groups: np.ndarray) -> None:
    """Runs a collective in each group, which connects its processes."""
    mesh = jax.sharding.Mesh(groups, ("groups", "devices"))
    split = NamedSharding(mesh, PartitionSpec("groups", "devices"))
    ones = jax.make_array_from_callback(groups.shape, split, lambda _: np.ones((1, 1), np.float32))
    totals = jax.jit(
        lambda x: x.sum(axis=1), out_shardings=NamedSharding(mesh, PartitionSpec("groups"))
    )
    totals(ones).block_until_ready()
    _used.add(_as_sets(groups))
