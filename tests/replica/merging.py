"""Short words for a merge, for tests."""

import distjax as dj


def context():
    return dj.get_replica_context()


def merge(fn, *args, **kwargs):
    return context().merge_call(fn, args=args, kwargs=kwargs)


def sum_of(strategy, x):
    return strategy.reduce("sum", x)
