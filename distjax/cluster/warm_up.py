"""First use of each group of devices, while all processes are still together.

When a group of devices is first used, gloo waits 30 seconds for its processes. That is too short
if one process is at slow work (reading data, compiling), so the groups are used up front.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distjax.cluster.agreement import agree
from distjax.cluster.facts import ComparedFact

_used: set[frozenset[frozenset[jax.Device]]] = set()


def warm_up() -> None:
    """Uses the groups that every job has: all devices, and one device per process."""
    devices = jax.devices()
    first = {device.process_index: device for device in reversed(devices)}
    _use(np.array([devices]))
    _use(np.array([[first[process] for process in sorted(first)]]))


def warm_up_groups(groups: np.ndarray) -> None:
    """Runs a collective in each group of devices; new groups are first agreed on in a meeting.

    Args:
      groups: devices [G, n], some of them of every process; a group may lie within one process.

    Raises:
      AgreementError: another process has different groups, or does something else.
      StuckError, PeerLostError: a process does not arrive.
    """
    spans_processes = any(len({d.process_index for d in group}) > 1 for group in groups)
    if not spans_processes or _as_sets(groups) in _used:
        return
    text = str([[device.id for device in group] for group in groups])
    fact = ComparedFact("the groups of devices of a strategy", text)
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
