"""The memory of K steps on the host: filled once, in place, by devices."""

import itertools

import jax
import numpy as np
import pytest

import distjax as dj
from distjax._src.data import input_layout
from distjax._src.data.input_layout import InputLayout
from distjax._src.placement.topology import mesh_topology, one_device_topology

ROWS = 16  # float32: 64 bytes, so that the part of each replica is aligned


@pytest.fixture(params=[0, 7])
def options(request):
    return dj.InputOptions(prefetch=request.param)


def values(steps):
    """The first number of every step."""
    return np.asarray(steps.arrays).reshape(steps.num_steps, -1)[:, 0].tolist()


@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16", "int4"])
def test_the_part_of_a_device_is_aligned_and_in_one_piece(num_steps, dtype):
    devices = jax.devices()[:3]
    shape, dtype = (3, 64, 2), jax.numpy.dtype(dtype)
    split = InputLayout(mesh_topology(devices, "replica")).allocate(num_steps, shape, dtype)
    together = InputLayout(one_device_topology(devices[0], 3, "replica"))
    whole = together.allocate(num_steps, shape, dtype)
    for part in (whole, InputLayout(None).allocate(num_steps, shape, dtype), *split.swapaxes(0, 1)):
        assert part.flags.c_contiguous and part.ctypes.data % 64 == 0
    for memory in (split, whole):
        assert (memory.shape, memory.dtype) == ((num_steps, *shape), dtype)


def test_cpu_devices_keep_the_memory(pair, monkeypatch):
    """The copy of an element to its place is the only one."""
    allocated, allocate = [], InputLayout.allocate

    def recorded(*args):
        allocated.append(allocate(*args))
        return allocated[-1]

    monkeypatch.setattr(InputLayout, "allocate", recorded)
    data = [np.full((2, ROWS), i, np.float32) for i in range(3)]
    steps = iter(pair.distribute_dataset(data, dj.InputOptions(prefetch=0))).take(3)
    (memory,) = allocated
    for shard in steps.arrays.addressable_shards:
        assert shard.data.unsafe_buffer_pointer() == memory[shard.index].ctypes.data
    assert values(steps) == [0, 1, 2]


def test_memory_is_not_filled_again(pair, options):
    data = (np.full((2, ROWS), i, np.float32) for i in range(12))
    iterator = iter(pair.distribute_dataset(data, options))
    held = [iterator.take(3) for _ in range(4)]
    assert [values(steps) for steps in held] == np.arange(12).reshape(4, 3).tolist()


def test_an_element_of_another_shape_is_kept_as_it_came(pair):
    """It ends the steps before it, and its source may change it before it is taken."""
    batches = [np.zeros((4, 2)), np.zeros((4, 2)), np.ones((2, 2))]
    iterator = iter(pair.distribute_dataset(iter(batches), dj.InputOptions(prefetch=0)))
    assert iterator.take(5).num_steps == 2
    batches[2][:] = 9
    assert values(iterator.take(5)) == [1]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 20])
def test_blocks_grow(pair, options, monkeypatch, count):
    """K may be far more than the data has: memory for all K is not asked for."""
    allocated, allocate = [], InputLayout.allocate

    def recorded(layout, num_steps, *args):
        allocated.append(num_steps)
        return allocate(layout, num_steps, *args)

    monkeypatch.setattr(InputLayout, "allocate", recorded)
    monkeypatch.setattr(input_layout, "_FIRST_BYTES", 2 * 2 * ROWS * 4)
    data = [np.full((2, ROWS), i, np.float32) for i in range(count)]
    steps = iter(pair.distribute_dataset(data, options)).take(10**12)
    assert values(steps) == list(range(count))
    assert allocated == [n for n in (2, 4, 8, 16, 32) if n < 2 * count or n == 2]


def test_an_element_larger_than_the_first_memory(pair, monkeypatch):
    monkeypatch.setattr(input_layout, "_FIRST_BYTES", 1)
    data = (np.full((2, ROWS), i, np.float32) for i in itertools.count())
    iterator = iter(pair.distribute_dataset(data, dj.InputOptions(prefetch=0)))
    assert values(iterator.take(5)) == [0, 1, 2, 3, 4]
    assert values(iterator.take(3)) == [5, 6, 7]


# -- whose memory ----------------------------------------------------------------


def reusing(count):
    """One buffer, filled anew for each batch."""
    batch = np.empty((2, ROWS), np.float32)
    for i in range(count):
        batch[:] = i
        yield batch


def first_numbers(pair, dataset):
    elements = list(dataset)  # all of them first: what the devices hold must not change
    return [[float(v.ravel()[0]) for v in pair.local_results(x)] for x in elements]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_source_that_fills_one_buffer_again_corrupts_nothing(pair, prefetch):
    options = dj.InputOptions(prefetch=prefetch)
    split = pair.distribute_dataset(reusing(5), options)
    assert first_numbers(pair, split) == [[i, i] for i in range(5)]
    each = pair.distribute_datasets_from_function(lambda _: reusing(6), options)
    assert first_numbers(pair, each) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_without_a_copy_no_memory_is_made_for_an_element(pair, prefetch, monkeypatch):
    options = dj.InputOptions(prefetch=prefetch, copy=False)
    data = [np.full((2, ROWS), i, np.float32) for i in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(InputLayout, "allocate", None)
        assert first_numbers(pair, pair.distribute_dataset(data, options)) == [
            [i, i] for i in range(5)
        ]
        each = pair.distribute_datasets_from_function(lambda _: data[:4], options)
        assert first_numbers(pair, each) == [[0, 1], [2, 3]]
    iterator = iter(pair.distribute_dataset(data, options))
    assert values(iterator.take(2)) == [0, 1]  # several steps are one array, so they are copied
    assert float(np.asarray(next(iterator).stacked).ravel()[0]) == 2
    assert values(iterator.take(5)) == [3, 4]
