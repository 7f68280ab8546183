"""What tests of the reference interpreter read and make."""

import numpy as np

import distjax as dj


def context():
    return dj.get_replica_context()


def rid():
    return int(context().replica_id_in_sync_group)


def variable(strategy, initial=10.0, name="v", **modes):
    with strategy.scope():
        return dj.Variable(initial, name=name, **modes)


def local(strategy, value):
    return [np.asarray(x).tolist() for x in strategy.local_results(value)]
