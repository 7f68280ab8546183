"""One value per replica, in and out, for tests."""

import numpy as np


def per_replica(strategy, values):
    """Returns values[r] on replica r; the default and one-device strategies take values[0]."""
    return strategy.distribute_values_from_function(
        lambda ctx: values[ctx.replica_id_in_sync_group]
    )


def ids(strategy, dtype=np.float32):
    """Returns the replica's number on each replica."""
    return per_replica(strategy, [dtype(r) for r in range(strategy.num_replicas_in_sync)])


def local(strategy, value):
    """Returns what each replica holds, as a list of Python numbers and lists."""
    return [np.asarray(v).tolist() for v in strategy.local_results(value)]


def everywhere(strategy, number):
    """Returns the list that `local` gives where every replica holds `number`."""
    return [number] * strategy.num_replicas_in_sync
