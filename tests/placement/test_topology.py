"""Topologies: devices, meshes and the errors of what does not fit."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import distjax as dj


def topology(strategy):
    return strategy.extended.topology


@pytest.mark.parametrize("devices", [None, []])
def test_default_devices_are_all_local_ones(devices):
    """TF: an empty list means all, too."""
    strategy = dj.MirroredStrategy(devices)
    assert strategy.extended.worker_devices == tuple(jax.devices())
    assert strategy.num_replicas_in_sync == 8


STRATEGIES = (dj.MirroredStrategy, dj.ShardedStrategy, dj.CentralStorageStrategy)


@pytest.mark.parametrize("make", STRATEGIES)
def test_devices_may_be_an_array_of_them(make):
    devices = np.array(jax.devices()[:2], dtype=object)
    assert make(devices).extended.worker_devices == tuple(devices)


@pytest.mark.parametrize("make", STRATEGIES)
def test_one_device_is_no_sequence(make):
    with pytest.raises(ValueError, match="^devices needs a sequence of jax.Device"):
        make(jax.devices()[0])


def test_mesh_of_a_mirrored_strategy():
    devices = jax.devices()[3:1:-1]  # the order is the user's
    strategy = dj.MirroredStrategy(devices)
    assert strategy.mesh.axis_names == ("replica",)
    assert strategy.mesh.axis_types == (AxisType.Auto,)
    assert list(strategy.mesh.devices.flat) == devices
    assert strategy.axis_name == "replica" == dj.REPLICA_AXIS
    assert strategy.extended.worker_devices == strategy.extended.parameter_devices
    assert strategy.extended.worker_devices == tuple(devices)


def test_axis_name_is_the_users():
    for strategy in (
        dj.MirroredStrategy(axis_name="batch"),
        dj.VirtualStrategy(2, axis_name="batch"),
        dj.OneDeviceStrategy(axis_name="batch"),
    ):
        assert strategy.axis_name == "batch"


def test_model_axes_divide_the_devices():
    strategy = dj.MirroredStrategy(model_axes={"model": 2, "expert": 2})
    assert strategy.num_replicas_in_sync == 2
    assert strategy.mesh.shape == {"replica": 2, "model": 2, "expert": 2}
    assert strategy.mesh.axis_types == (AxisType.Auto,) * 3
    assert topology(strategy).replica_devices(1) == tuple(jax.devices()[4:])
    assert "R=2 over 'replica' on 8 devices, model=2, expert=2" in repr(strategy)


def test_strategies_without_a_mesh():
    for strategy in (
        dj.VirtualStrategy(3, jax.devices()[5]),
        dj.OneDeviceStrategy(jax.devices()[5]),
    ):
        assert strategy.mesh is None
        assert strategy.extended.worker_devices == (jax.devices()[5],)
        sharding = SingleDeviceSharding(jax.devices()[5])
        assert topology(strategy).mirrored == topology(strategy).per_replica == sharding
        assert topology(strategy).replica_devices(0) == (jax.devices()[5],)


def test_shardings_of_a_mesh():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    assert topology(strategy).mirrored == NamedSharding(strategy.mesh, PartitionSpec())
    assert topology(strategy).per_replica == NamedSharding(strategy.mesh, PartitionSpec("replica"))


def test_one_object_for_equal_devices_replicas_and_axes():
    two = jax.devices()[:2]
    a, b = topology(dj.MirroredStrategy(two)), topology(dj.MirroredStrategy(two))
    assert a is b  # one object, so that programs compare it fast
    for other in (
        dj.MirroredStrategy(two[::-1]),
        dj.MirroredStrategy(two, axis_name="batch"),
        dj.MirroredStrategy(two, model_axes={"model": 1}),
        dj.MirroredStrategy(jax.devices()[:4], model_axes={"model": 2}),
        dj.MirroredStrategy(two[:1]),
        dj.VirtualStrategy(2),
    ):
        assert a != topology(other)
    assert topology(dj.VirtualStrategy(1)) != topology(dj.MirroredStrategy(two[:1]))
    assert a != "a topology"


@pytest.mark.parametrize("count", [0, -1, 2.0, "2", None, (2,)])
def test_num_replicas_needs_a_positive_int(count):
    with pytest.raises(ValueError, match="^num_replicas needs an int of 1 or more"):
        dj.VirtualStrategy(count)


def test_num_replicas_takes_numpy_ints_and_no_bools():
    assert dj.VirtualStrategy(np.int64(2)).num_replicas_in_sync == 2
    with pytest.raises(ValueError, match="^num_replicas needs an int of 1 or more"):
        dj.VirtualStrategy(True)


@pytest.mark.parametrize("devices", [["cpu:0"], [0, 1], "cpu:0"])
def test_devices_need_to_be_devices(devices):
    with pytest.raises(ValueError, match="^devices needs a sequence of jax.Device"):
        dj.MirroredStrategy(devices)


def test_r179_repeated_devices():
    one = jax.devices()[0]
    with pytest.raises(ValueError, match="^devices needs at least one device. No duplicates all"):
        dj.MirroredStrategy([one, one])


def test_model_axes_that_do_not_fit():
    with pytest.raises(
        ValueError, match="^model_axes needs names other than the replica axis 'r"
    ) as caught:
        dj.MirroredStrategy(model_axes={"replica": 2})
    assert str(caught.value).endswith(
        "Fix: rename it: model_axes={'model': 2}; or rename the replica axis: axis_name='data'"
    )
    renamed = dj.MirroredStrategy(model_axes={"replica": 2}, axis_name="data")
    assert renamed.axis_name == "data" and renamed.num_replicas_in_sync == 4
    for axes, product in (({"model": 3}, 3), ({"a": 2, "b": 8}, 16)):
        with pytest.raises(ValueError, match=f"needs a number of devices divisible by {product}"):
            dj.MirroredStrategy(model_axes=axes)
    for axes in ({"model": 0}, {"model": -2}, {"a": -1, "b": -2}):
        with pytest.raises(
            ValueError, match="^model_axes needs a dict from names to sizes of 1 or"
        ):
            dj.MirroredStrategy(model_axes=axes)


@pytest.mark.parametrize("make", [dj.OneDeviceStrategy, lambda d: dj.VirtualStrategy(2, d)])
def test_one_device_needs_to_be_a_device(make):
    for device in ("cpu:0", 0, jax.devices()[:2]):
        with pytest.raises(ValueError, match="^device needs a jax.Device"):
            make(device)
