"""reduce and gather with a mask of the examples that count (decision 16)."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError
from tests.replicas import ids, pads, per_replica


def test_r111_mean_over_examples_where_replicas_have_more_or_fewer(pair, how):
    x, mask = pads(pair, [[1, 2], [3]], np.float32)
    assert float(how(lambda x, m: pair.reduce("mean", x, axis=0, mask=m))(x, mask)) == 2.0


def test_mask_of_a_replica_without_examples():
    three = dj.VirtualStrategy(3)
    x, mask = pads(three, [[1, 2], [], [6]], np.int32)
    assert float(three.reduce("mean", x, axis=0, mask=mask)) == 3.0
    assert int(three.reduce("sum", x, axis=0, mask=mask)) == 9


def test_mask_counts_what_is_true(pair):
    hits, mask = pads(pair, [[True, True, False], [True]], np.bool_)
    total = pair.reduce("sum", hits, axis=0, mask=mask)
    assert int(total) == 3 and total.dtype == pair.reduce("sum", hits, axis=0).dtype
    np.testing.assert_array_equal(pair.reduce("sum", hits, mask=mask), [2, 1, 0])
    assert float(pair.reduce("mean", hits, axis=0, mask=mask)) == 0.75


def test_a_masked_mean_of_float16_does_not_overflow(pair):
    x, mask = pads(pair, [[20.0] * 4000, [20.0] * 3000], np.float16)
    mean = pair.reduce("mean", x, axis=0, mask=mask)
    assert float(mean) == 20 and mean.dtype == jnp.float16


def test_mask_ignores_what_is_not_a_number(pair):
    x = per_replica(pair, [np.array([1, np.nan], np.float32), np.array([3, np.inf], np.float32)])
    mask = per_replica(pair, [np.array([True, False])] * 2)
    assert float(pair.reduce("mean", x, axis=0, mask=mask)) == 2.0


def test_mask_without_an_axis_counts_elementwise(pair):
    x, mask = pads(pair, [[1, 2], [3]], np.float32)
    np.testing.assert_array_equal(pair.reduce("sum", x, mask=mask), [4, 2])
    np.testing.assert_array_equal(pair.reduce("mean", x, mask=mask), [2, 2])


def test_mask_over_further_axes(pair):
    x = per_replica(pair, [np.full((2, 3), r + 1.0, np.float32) for r in range(2)])
    mask = per_replica(pair, [np.array([True, True]), np.array([True, False])])
    assert float(pair.reduce("sum", x, axis=(0, 1), mask=mask)) == 12.0
    np.testing.assert_allclose(pair.reduce("mean", x, axis=0, mask=mask), [4 / 3] * 3, rtol=1e-6)


def test_mask_equal_on_every_replica(pair):
    x = per_replica(pair, [np.array([1, 2], np.float32), np.array([3, 4], np.float32)])
    assert float(pair.reduce("sum", x, axis=0, mask=np.array([True, False]))) == 4.0
    value = pair.run(lambda: jnp.array([1.0, 2.0]))
    assert float(pair.reduce("sum", value, axis=0, mask=np.array([True, False]))) == 2.0


@pytest.mark.parametrize("mask", [np.array([1.0, 0.0]), np.array([True]), np.ones((2, 2), bool)])
def test_masks_that_do_not_fit(pair, mask):
    x = per_replica(pair, [np.array([1, 2], np.float32)] * 2)
    with pytest.raises(BatchError, match=r"^reduce: mask needs bool values of shape \(2,\) per"):
        pair.reduce("sum", x, axis=0, mask=mask)


def test_where_nothing_counts_a_sum_is_0_and_a_mean_nan(pair):
    x, mask = pads(pair, [[1, 2], [3]], np.float32)
    nothing = pair.run(jnp.zeros_like, args=(mask,))
    assert float(pair.reduce("sum", x, axis=0, mask=nothing)) == 0
    assert np.isnan(float(pair.reduce("mean", x, axis=0, mask=nothing)))


def test_mask_with_a_tree(pair):
    with pytest.raises(TypeError, match="^reduce with an axis or a mask needs one value"):
        pair.reduce("sum", [ids(pair)], mask=np.array([True]))


# -- gather -------------------------------------------------------------------


def test_what_is_gathered_with_a_mask_is_the_batch_without_padding(strategy):
    count = strategy.num_replicas_in_sync
    batches = [np.arange(2 * count), np.arange(2 * count - 1), np.arange(1)]
    options = dj.InputOptions(partial="pad")
    for i, batch in enumerate(strategy.distribute_dataset(batches, options)):
        out = strategy.run(lambda x: {"x": x, "twice": jnp.stack([x, x])}, args=(batch.data,))
        gathered = strategy.gather(out["x"], axis=0, mask=batch.mask)
        assert isinstance(gathered, np.ndarray)
        np.testing.assert_array_equal(gathered, batches[i])
        twice = strategy.gather({"a": out["twice"]}, axis=1, mask=batch.mask)["a"]
        np.testing.assert_array_equal(twice, [batches[i], batches[i]])


def test_a_mask_to_gather_by_fits_and_has_values(pair):
    x, mask = pads(pair, [[1, 2], [3]], np.float32)
    for wrong in (pair.run(lambda m: m[:1], args=(mask,)), pair.run(jnp.float32, args=(mask,))):
        with pytest.raises(ValueError, match=r"^gather needs a bool mask \[4\], one entry per el"):
            pair.gather(x, axis=0, mask=wrong)
    with pytest.raises(ValueError, match="^gather with a mask needs values, not a trace"):
        dj.jit(lambda x, m: pair.gather(x, axis=0, mask=m))(x, mask)
