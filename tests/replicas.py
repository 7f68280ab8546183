"""One value per replica, in and out, and functions that count their traces, for tests."""

import functools

import numpy as np

import distjax as dj
from tests.processes.laws import HOW
from tests.processes.worker import exchange


def per_replica(strategy, values):
    """Returns values[r] on replica r; the default and one-device strategies take values[0]."""
    return strategy.distribute_values_from_function(
        lambda ctx: values[ctx.replica_id_in_sync_group]
    )


def ids(strategy, dtype=np.float32):
    """Returns the replica's number on each replica."""
    return per_replica(strategy, [dtype(r) for r in range(strategy.num_replicas_in_sync)])


def local(strategy, value):
    """Returns what each replica holds, of all processes, as a list of Python numbers and lists."""
    own = [np.asarray(v).tolist() for v in strategy.local_results(value)]
    if not strategy.extended.is_default and strategy.extended.topology.spans_processes:
        return sum(exchange(own), [])
    return own


def everywhere(strategy, number):
    """Returns the list that `local` gives where every replica holds `number`."""
    return [number] * strategy.num_replicas_in_sync


def num_copies(strategy, variable):
    """Returns how many copies of `variable` `local_results` and `update` speak of: 1 or R."""
    kind = dj.locality(variable).kind
    is_one = kind in ("partitioned", "host") or kind.startswith(("at ", "in shards"))
    return 1 if is_one else strategy.num_replicas_in_sync


def num_local_copies(strategy, variable):
    """Returns how many copies of `variable` this process has."""
    if num_copies(strategy, variable) == 1 or strategy.extended.is_default:
        return 1
    return len(strategy.extended.topology.local_replicas)


def here(strategy, rows, how):
    """Returns those of a row per copy that a call through `how` gives on this process.

    All of them in a trace, which is the same on every process.
    """
    if how is HOW["jit"] or len(rows) == 1 or not strategy.extended.topology.spans_processes:
        return rows
    return [rows[replica] for replica in strategy.extended.topology.local_replicas]


def pads(strategy, rows, dtype):
    """Returns rows[r] on replica r, padded with 99, and the mask of what counts."""
    width = max(map(len, rows))
    values = [np.array([*row, *[99] * (width - len(row))], dtype) for row in rows]
    masks = [np.arange(width) < len(row) for row in rows]
    return per_replica(strategy, values), per_replica(strategy, masks)


def counted(fn):
    """Returns a function that counts how often Python runs it."""

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return fn(*args, **kwargs)

    wrapper.calls = 0
    return wrapper
