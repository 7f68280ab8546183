"""take: the input of several steps in one transfer."""

import jax
import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError
from tests.conftest import STRATEGIES
from tests.replicas import local


@pytest.fixture(params=[0, 7])
def options(request):
    return dj.InputOptions(prefetch=request.param)


def batches(strategy, count, rows=2):
    size = rows * strategy.num_replicas_in_sync
    return [np.arange(size, dtype=np.float32) + 100 * i for i in range(count)]


def element(steps, k):
    return steps.as_element(jax.tree.map(lambda x: x[k], steps.arrays))


@pytest.fixture(params=["one_device", "mirrored1", "mirrored2", "mirrored8", "virtual3"])
def placed(request):
    """Strategies that move input to devices of theirs (the default one does not)."""
    return STRATEGIES[request.param]()


def test_steps_hold_what_next_would_have_given(placed, options):
    data = [{"x": b, "y": (b[:, None],)} for b in batches(placed, 7)]
    dataset = placed.distribute_dataset(data, options)
    expected = list(dataset)
    iterator = iter(dataset)
    found, sizes = [], []
    for steps in iter(lambda: next_steps(iterator, 3), None):
        sizes.append(steps.num_steps)
        found += [element(steps, k) for k in range(steps.num_steps)]
    assert sizes == [3, 3, 1]
    for one, other in zip(found, expected, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other)
        jax.tree.map(np.testing.assert_array_equal, one, other)


def next_steps(iterator, count):
    try:
        return iterator.take(count)
    except StopIteration:
        return None


def test_steps_lie_on_the_replicas(placed):
    """Axis 1 is that of the replicas, so that a slice needs no transfer."""
    r = placed.num_replicas_in_sync
    steps = iter(placed.distribute_dataset(batches(placed, 4))).take(4)
    shape = (4, r, 2) if r > 1 else (4, 2)
    assert steps.arrays.shape == shape
    assert steps.arrays.sharding.device_set == set(placed.extended.worker_devices)
    if placed.mesh is not None:
        assert steps.arrays.sharding.shard_shape(shape) == (4, *(1,) * (r > 1), 2)
    if r > 1:
        assert dj.locality(element(steps, 0)).kind == "per_replica"


def test_one_transfer_of_each_leaf_for_all_steps(mirrored, monkeypatch):
    shapes, make = [], jax.make_array_from_callback

    def counted(shape, *args, **kwargs):
        shapes.append(shape)
        return make(shape, *args, **kwargs)

    monkeypatch.setattr(jax, "make_array_from_callback", counted)
    data = [{"x": np.zeros((4, 3)), "y": np.zeros(4)}] * 5
    iterator = iter(mirrored.distribute_dataset(data, dj.InputOptions(prefetch=0)))
    iterator.take(5)
    assert shapes == [(5, 2, 2, 3), (5, 2, 2)]
    shapes.clear()
    next(iter(mirrored.distribute_dataset(data, dj.InputOptions(prefetch=0))))
    assert shapes == [(2, 2, 3), (2, 2)]


def test_a_compiled_loop_over_steps(placed):
    with placed.scope():
        v = dj.Variable(0.0)
    data = batches(placed, 6)
    steps = iter(placed.distribute_dataset(data)).take(6)

    def body(carry, arrays):
        mean = placed.reduce("mean", steps.as_element(arrays), axis=0)
        v.assign(v.value + mean)
        return carry, mean

    _, means = dj.jit(lambda xs: dj.lax.scan(body, 0, xs))(steps.arrays)
    expected = [b.mean() for b in data]
    np.testing.assert_allclose(means, expected, rtol=1e-6)
    np.testing.assert_allclose(v.value, sum(expected), rtol=1e-6)


def test_next_and_take_can_be_mixed(pair, options):
    """What was prefetched for one is not lost for the other."""
    iterator = iter(pair.distribute_dataset(batches(pair, 20), options))
    found = []
    for size in (None, None, 3, 3, 1, None, 4, 2, None):
        if size is None:
            found.append(next(iterator))
        else:
            steps = iterator.take(size)
            assert steps.num_steps == size
            found += [element(steps, k) for k in range(size)]
        assert iterator.get_state()["delivered"] == len(found)
    assert [local(pair, x)[0][0] for x in found] == [100.0 * i for i in range(17)]


def test_a_change_of_shape_ends_the_steps_early(pair, options):
    data = [np.zeros(n) for n in (4, 4, 4, 2, 2, 4)]
    iterator = iter(pair.distribute_dataset(iter(data), options))
    shapes = [iterator.take(5).arrays.shape for _ in range(3)]
    assert shapes == [(3, 2, 2), (2, 2, 1), (1, 2, 2)]
    with pytest.raises(StopIteration):
        iterator.take(5)


def test_steps_before_an_error_come_first(pair, options):
    def source():
        yield from batches(pair, 3)
        raise OSError("gone")

    iterator = iter(pair.distribute_dataset(source(), options))
    assert iterator.take(2).num_steps == 2
    assert iterator.take(2).num_steps == 1
    with pytest.raises(OSError, match="gone"):
        iterator.take(2)
    with pytest.raises(StopIteration):
        iterator.take(2)


def test_an_error_that_was_prefetched_survives_another_size(pair):
    data = [np.zeros(4), np.zeros(4), np.zeros(3)]
    iterator = iter(pair.distribute_dataset(iter(data), dj.InputOptions(prefetch=9)))
    next(iterator)
    assert iterator.take(4).num_steps == 1
    with pytest.raises(BatchError):
        next(iterator)


def test_padded_steps(pair):
    data = [np.arange(4.0), np.arange(3.0)]
    steps = iter(pair.distribute_dataset(data, dj.InputOptions("pad"))).take(2)
    assert isinstance(steps.arrays, dj.Batch)
    assert local(pair, element(steps, 1).mask) == [[True, True], [True, False]]


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None])
def test_the_number_of_steps(pair, count):
    iterator = iter(pair.distribute_dataset(batches(pair, 2)))
    with pytest.raises(ValueError, match="^take: num_steps needs an int of 1 or more"):
        iterator.take(count)
