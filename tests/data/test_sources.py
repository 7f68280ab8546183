"""Where batches come from: what numpy takes, and what reuses its memory."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError
from tests.replicas import local


@pytest.fixture(params=[0, 2])
def options(request):
    return dj.InputOptions(prefetch=request.param)


@pytest.mark.pairwise
@pytest.mark.parametrize("size", [2, 1024, 4096])
def test_a_source_may_fill_the_same_buffer_again(strategy, options, size):
    """On CPU `device_put` keeps numpy's memory where it is aligned."""
    buffer = np.zeros((strategy.num_replicas_in_sync, size), np.float32)

    def source():
        for i in range(6):
            buffer[:] = i
            yield buffer

    if strategy is dj.get_strategy():
        options = dj.InputOptions("drop", options.prefetch)
    found = list(strategy.distribute_dataset(source(), options))
    assert [np.asarray(strategy.local_results(x)[0]).max() for x in found] == list(range(6))
    buffer[:] = 9
    assert np.asarray(strategy.local_results(found[0])[-1]).max() == 0


def test_a_function_may_fill_the_same_buffer_again(pair, options):
    buffer = np.zeros(1024, np.float32)

    def fn(context):
        for i in range(4):
            buffer[:] = i
            yield buffer

    found = list(pair.distribute_datasets_from_function(fn, options))
    assert [[v[0] for v in local(pair, x)] for x in found] == [[0, 1], [2, 3]]


def test_steps_of_a_buffer_that_is_filled_again(pair, options):
    buffer = np.zeros(4, np.float32)
    source = (np.add(buffer, 1, out=buffer) for _ in range(3))
    steps = iter(pair.distribute_dataset(source, options)).take(3)
    assert np.asarray(steps.arrays)[:, 0, 0].tolist() == [1, 2, 3]


def test_jax_arrays(pair, options):
    replicated = jax.device_put(jnp.arange(4), jax.devices()[7])
    batches = [jnp.arange(4), replicated, pair.extended.broadcast_to(np.arange(4))]
    for x in pair.distribute_dataset(batches, options):
        assert local(pair, x) == [[0, 1], [2, 3]]


def test_dtypes(pair):
    names = ["float32", "float16", "bfloat16", "int8", "uint16", "bool", "complex64", "int4"]
    batch = {name: np.zeros(2, jnp.dtype(name)) for name in names}
    (x,) = pair.distribute_dataset([batch])
    assert {name: str(leaf.dtype) for name, leaf in x.items()} == {n: n for n in names}


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">c8", ">u4"])
def test_numbers_in_another_byte_order(pair, dtype):
    """As HDF5 and FITS files have them."""
    element = next(iter(pair.distribute_dataset([np.arange(4).astype(dtype)])))
    assert local(pair, element) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble, "m8[s]", "M8[s]"])
def test_dtypes_that_jax_has_not(pair, dtype):
    with pytest.raises(BatchError, match="^batch 0 needs arrays of numbers"):
        next(iter(pair.distribute_dataset([np.zeros(4, dtype)])))


def test_memory_in_another_order(pair):
    batch = np.arange(12).reshape(3, 4).T
    (x,) = pair.distribute_dataset([batch])
    assert local(pair, x) == [batch[:2].tolist(), batch[2:].tolist()]


def test_objects_with_numpys_protocol(pair):
    """As tensors of TensorFlow have it."""

    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.arange(4, dtype=dtype)

    (x,) = pair.distribute_dataset([{"x": Tensor()}])
    assert local(pair, x["x"]) == [[0, 1], [2, 3]]


def test_arrays_of_batches_are_datasets(pair):
    assert [local(pair, x) for x in pair.distribute_dataset(np.arange(4).reshape(2, 2))] == [
        [[0], [1]],
        [[2], [3]],
    ]


class Pair(typing.NamedTuple):
    x: np.ndarray
    y: np.ndarray


def test_a_named_tuple_of_arrays_is_no_list_of_batches(pair):
    data = Pair(np.ones((8, 2)), np.arange(8))
    with pytest.raises(TypeError) as info:
        pair.distribute_dataset(data)
    assert str(info.value) == (
        "distribute_dataset needs an iterable of batches, not one tree of arrays.\n"
        "  Got: a Pair, a NamedTuple with the fields ['x', 'y'].\n"
        "  Why: its items would be the batches: all of one field, then all of the next.\n"
        "  Fix: [x] if x is one batch; [jax.tree.map(lambda a: a[i : i + G], x) for i in "
        "range(0, N, G)] for batches of G of its N examples"
    )
    halves = [jax.tree.map(lambda a: a[i : i + 4], data) for i in (0, 4)]  # noqa: B023
    batches = list(pair.distribute_dataset(halves))
    assert [local(pair, b.y) for b in batches] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


@pytest.mark.parametrize("make", [np.float32, np.float16, jnp.bfloat16, jnp.float32])
def test_an_array_of_examples_is_no_list_of_batches(pair, make):
    data = make(np.arange(16).reshape(8, 2))
    for partial in ("error", "pad", "drop"):
        with pytest.raises(TypeError) as info:
            pair.distribute_dataset(data, dj.InputOptions(partial=partial))
        first, _, why, fix = str(info.value).split("\n")
        assert first == "distribute_dataset needs an iterable of batches, not an array of examples."
        assert why == (
            "  Why: each of its rows would be a batch, and the numbers of a row would be split "
            "over the replicas."
        )
        assert fix == (
            "  Fix: [x[i : i + G] for i in range(0, len(x), G)] for batches of G rows; list(x) if "
            "each row is a batch of numbers"
        )
    for batches, count in ([data[i : i + 4] for i in range(0, 8, 4)], 2), (list(data), 8):
        assert len(list(pair.distribute_dataset(batches))) == count
    assert len(list(pair.distribute_dataset(data.reshape(2, 4, 2)))) == 2


def torch_loader(workers=0):
    torch = pytest.importorskip("torch", reason="torch is not a dependency")
    data = torch.utils.data.TensorDataset(torch.arange(14.0), torch.arange(14)[:, None])
    context = "spawn" if workers else None
    return torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=workers, multiprocessing_context=context
    )


def test_torch_loaders(pair, options):
    dataset = pair.distribute_dataset(torch_loader(), options)
    assert len(dataset) == 4
    found = list(dataset)
    assert local(pair, found[3][0]) == [[12], [13]]
    assert local(pair, found[0][1]) == [[[0], [1]], [[2], [3]]]
    iterator = iter(dataset)
    next(iterator), next(iterator)
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert local(pair, next(resumed)[0]) == local(pair, next(iterator)[0]) == [[8, 9], [10, 11]]


@pytest.mark.slow
def test_torch_loaders_with_processes(mirrored):
    found = [local(mirrored, x) for x, _ in mirrored.distribute_dataset(torch_loader(workers=1))]
    assert found == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]], [[12], [13]]]


def test_torch_datasets_of_batches(pair):
    """A map-style dataset: a length, items, and no __iter__."""
    torch = pytest.importorskip("torch", reason="torch is not a dependency")

    class Batches(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            if index >= 2:
                raise IndexError
            return torch.full((2,), index)

    dataset = pair.distribute_dataset(Batches())
    assert [local(pair, x) for x in dataset] == [[[0], [0]], [[1], [1]]]
    assert len(pair.distribute_dataset(Batches(), dj.InputOptions("drop"))) == 2


def test_tf_data(pair, options):
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not a dependency")
    made = tf.data.Dataset.range(10).map(lambda i: {"x": i, "y": (i * i,)}).batch(4)
    dataset = pair.distribute_dataset(made, options)
    assert len(dataset) == 3
    found = [(local(pair, e["x"]), local(pair, e["y"][0])) for e in dataset]
    assert found[2] == ([[8], [9]], [[64], [81]])
    endless = iter(pair.distribute_dataset(made.repeat(), options))
    assert local(pair, next(endless)["x"]) == [[0, 1], [2, 3]]
