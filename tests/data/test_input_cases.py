"""The cases of `tests/cases.md`, "Input", that concern one process."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError
from tests.replicas import local, per_replica

DROP, PAD = dj.InputOptions("drop"), dj.InputOptions("pad")


def batched(values, size):
    """What Dataset.from_tensor_slices(values).batch(size) gives."""
    values = np.asarray(values)
    return [values[i : i + size] for i in range(0, len(values), size)]


def kept(strategy, batch):
    """Returns the examples of a Batch that count, per replica."""
    rows = zip(local(strategy, batch.data), local(strategy, batch.mask), strict=True)
    return [[x for x, keep in zip(xs, mask, strict=True) if keep] for xs, mask in rows]


def squares(strategy, dataset, options=None):
    out = []
    for x in strategy.distribute_dataset(dataset, options):
        data = x.data if isinstance(x, dj.Batch) else x
        y = strategy.run(lambda x: x * x, args=(data,))
        mask = x.mask if isinstance(x, dj.Batch) else None
        parts = kept(strategy, dj.Batch(y, mask)) if mask is not None else local(strategy, y)
        out.append(list(itertools.chain(*parts)))
    return out


def test_r285_every_strategy_squares_every_batch(strategy):
    """[5, 6, 7, 8] in batches of 2; padded where R does not divide 2."""
    options = PAD if 2 % strategy.num_replicas_in_sync else None
    assert squares(strategy, batched([5.0, 6, 7, 8], 2), options) == [[25, 36], [49, 64]]


def test_r287_a_partial_batch(strategy):
    assert squares(strategy, batched([5.0, 6, 7], 2), PAD) == [[25, 36], [49]]


def test_r289_mean_over_partial_batches(pair):
    """The mean of each batch, as the row's reduce over one of two batches: 5.5, then 7."""
    means = [
        float(pair.reduce("mean", b.data, axis=0, mask=b.mask))
        for b in pair.distribute_dataset(batched([5.0, 6, 7], 2), PAD)
    ]
    assert means == [5.5, 7.0]
    (whole,) = pair.distribute_dataset([np.float32([5, 6, 7])], PAD)
    assert float(pair.reduce("mean", whole.data, axis=0, mask=whole.mask)) == 6.0


def test_r291_shapes_that_differ_per_replica_are_refused(pair):
    """[1, 2] on replica 0 and [1, 2, 3] on replica 1: decision 16 has one shape per step."""

    def fn(context):
        return [np.float32([[1, 2]] * 2), np.float32([[1, 2, 3]] * 2)]

    with pytest.raises(BatchError, match="(?s)one structure and one shape.*float32.2, 3. on repl"):
        next(iter(pair.distribute_datasets_from_function(fn)))


def test_r293_outputs_that_do_not_depend_on_the_batch(strategy):
    (batch,) = strategy.distribute_dataset(batched([5.0], 2), PAD)
    zeros, y = strategy.run(lambda x: (jnp.zeros(3), x * x), args=(batch.data,))
    assert np.asarray(strategy.local_results(zeros)[-1]).tolist() == [0, 0, 0]
    parts = kept(strategy, dj.Batch(y, batch.mask))
    assert parts[0] == [25] and not any(parts[1:])


def test_r295_a_captured_variable(pair):
    with pair.scope():
        v = dj.Variable(1.0)
    data = pair.distribute_datasets_from_function(
        lambda context: itertools.cycle([np.float32(2), np.float32(3)])
    )
    for x in itertools.islice(data, 2):
        out = pair.run(lambda x: x * x + v.value, args=(x,))
        assert float(pair.reduce("mean", out)) == 7.5


def test_r297_a_function_whose_last_step_is_not_full(pair):
    def fn(context):
        return batched(np.arange(9), 2)

    padded = pair.distribute_datasets_from_function(fn, PAD)
    expected = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], []]]
    assert [kept(pair, batch) for batch in padded] == expected
    dropped = pair.distribute_datasets_from_function(fn, DROP)
    assert [local(pair, x) for x in dropped] == expected[:2]
    with pytest.raises(BatchError):
        pair.distribute_datasets_from_function(fn)


def test_r299_tuples(pair):
    def fn(context):
        return zip(range(10), (i * i for i in range(10)), strict=True)

    found = [
        (local(pair, x), local(pair, y)) for x, y in pair.distribute_datasets_from_function(fn)
    ]
    assert found == [([i, i + 1], [i * i, (i + 1) ** 2]) for i in range(0, 10, 2)]


@pytest.mark.parametrize(
    ("count", "last"), [(8, None), (9, [[8], []]), (10, [[8, 9], []]), (11, [[8, 9], [10]])]
)
def test_r307_batches_of_four_on_two_replicas(pair, count, last):
    """Padded batches are split in blocks of full size: [8], [9] there is [8, 9], [] here."""
    dataset = batched(np.arange(count), 4)
    full = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    found = [kept(pair, batch) for batch in pair.distribute_dataset(dataset, PAD)]
    assert found == full + [last] * (last is not None)
    assert [local(pair, x) for x in pair.distribute_dataset(dataset, DROP)] == full
    if count % 2 == 0:
        found = [local(pair, x) for x in pair.distribute_dataset(dataset)]
        assert found == full + [[[8], [9]]] * (last is not None)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (4, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []], [[8, 9], [], []]]),
        (5, [[[0, 1], [2, 3], [4]], [[5, 6], [7, 8], [9]]]),
    ],
)
def test_r309_batches_that_three_replicas_do_not_divide(size, expected):
    strategy = dj.VirtualStrategy(3)
    dataset = strategy.distribute_dataset(batched(np.arange(10), size), PAD)
    assert [kept(strategy, batch) for batch in dataset] == expected


def test_r311_a_pipeline_of_its_own_for_each_replica(pair):
    """There is one call per process here: the function interleaves the pipelines."""

    def pipeline(replica):
        return (10 * replica + i for i in range(3))

    def fn(context):
        pipelines = [pipeline(r) for r in range(context.num_replicas_in_sync)]
        return itertools.chain.from_iterable(zip(*pipelines, strict=True))

    found = [local(pair, x) for x in pair.distribute_datasets_from_function(fn)]
    assert found == [[0, 10], [1, 11], [2, 12]]


def test_r315_arrays_in_order_twice(strategy):
    """The results put end to end are the arrays in their order, twice; then the data ends."""
    r = strategy.num_replicas_in_sync
    x, y = np.arange(12 * r).reshape(6 * r, 2), np.arange(6 * r)
    once = [(x[i : i + 2 * r], y[i : i + 2 * r]) for i in range(0, 6 * r, 2 * r)]
    iterator = iter(strategy.distribute_dataset([*once, *once]))
    xs, ys = [], []
    for _ in range(6):
        out = strategy.run(lambda x, y: (x, y), args=next(iterator))
        for a, b in strategy.local_results(out):
            xs.append(np.asarray(a))
            ys.append(np.asarray(b))
    np.testing.assert_array_equal(np.concatenate(xs), np.concatenate([x, x]))
    np.testing.assert_array_equal(np.concatenate(ys), np.concatenate([y, y]))
    with pytest.raises(StopIteration):
        next(iterator)


def test_r069_nested_output(pair):
    for i, x in enumerate(pair.distribute_dataset(batched(np.arange(4), 2))):
        out = pair.run(lambda x: [{"a": x - 1, "b": x + 1}], args=(x,))
        assert local(pair, out[0]["a"]) == [[2 * i - 1], [2 * i]]
        assert local(pair, out[0]["b"]) == [[2 * i + 1], [2 * i + 2]]


def test_elements_meet_values_made_per_replica(pair):
    weights = per_replica(pair, [np.float32(1), np.float32(10)])
    (x,) = pair.distribute_dataset([np.float32([1, 2])])
    assert local(pair, pair.run(lambda x, w: x * w, args=(x, weights))) == [[1], [20]]
