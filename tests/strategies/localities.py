"""Strategies, values and questions for the tests of locality rules."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import distjax as dj
from tests.replicas import per_replica

DEVICES = jax.devices()[2:4]  # not the first ones: nothing gets there by itself
SHAPE = (4, 2)  # split in halves by ShardedStrategy

STRATEGIES = {
    "mirrored": lambda: dj.MirroredStrategy(DEVICES),
    "virtual": lambda: dj.VirtualStrategy(2, DEVICES[0]),
    "sharded": lambda: dj.ShardedStrategy(DEVICES, partition="parameters", min_split_bytes=0),
    "central": lambda: dj.CentralStorageStrategy(DEVICES),
}
#: The locality of a variable of SHAPE, by its strategy's policy.
KINDS = {
    dj.MirroredStrategy: "mirrored",
    dj.VirtualStrategy: "mirrored",
    dj.ShardedStrategy: "partitioned",
    dj.CentralStorageStrategy: "host",
}


@pytest.fixture(params=STRATEGIES)
def d(request):
    """The strategy `d` of the locality rules, of two replicas."""
    return STRATEGIES[request.param]()


@pytest.fixture
def v(d):
    with d.scope():
        return dj.Variable(jnp.ones(SHAPE), name="v")


@pytest.fixture
def t(d):
    """A value of locality T: zeros on replica 0, ones on replica 1."""
    return per_replica(d, [np.zeros(SHAPE, np.float32), np.ones(SHAPE, np.float32)])


def context_of(strategy):
    """Returns the name of the active context, which has to be one of `strategy`."""
    if not dj.has_strategy():
        return "default"
    assert dj.get_strategy() is strategy
    assert dj.in_cross_replica_context() is (dj.get_replica_context() is None)
    return "cross-replica" if dj.in_cross_replica_context() else "replica"


@contextlib.contextmanager
def refused(error, first_line):
    """The block raises `error`, and its first line starts with `first_line`."""
    with pytest.raises(error) as caught:
        yield
    first = str(caught.value).splitlines()[0]
    assert first.startswith(first_line), first


def placed(d, spec):
    """Returns the sharding `spec` over the replicas; on one device it is all there."""
    if d.mesh is None:
        return SingleDeviceSharding(DEVICES[0])
    return NamedSharding(d.mesh, spec)


def assert_t(d, x):
    """A value of its own on each replica: a PerReplica, split over the workers."""
    assert isinstance(x, dj.PerReplica)
    assert x.stacked.sharding == placed(d, PartitionSpec("replica"))
    assert dj.locality(x).kind == "per_replica"


def assert_m(d, x):
    """One value, with a copy on each worker: a plain array."""
    assert isinstance(x, jax.Array)
    assert x.sharding == placed(d, PartitionSpec()) and x.committed


def assert_v(v, x):
    """A value laid out as `v` is where it is read and updated: in shards, or whole on each."""
    is_split = dj.locality(v).kind == "partitioned"
    where = placed(v.strategy, PartitionSpec("replica") if is_split else PartitionSpec())
    assert isinstance(x, jax.Array)
    assert x.sharding == v.value.sharding == where and x.committed


def call_in_replica(method, *args):
    """Calls a cross-replica method where it is not allowed."""
    assert dj.get_replica_context() is not None
    return method(*args)
