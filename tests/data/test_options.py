"""The small types: InputContext, InputOptions, Batch."""

import dataclasses

import jax
import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError


def test_r283_input_context():
    context = dj.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=6)
    assert context.num_replicas_in_sync == 6
    assert context.input_pipeline_id == 1
    assert context.num_input_pipelines == 2
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match="needs a global batch size that 6 replicas divide") as e:
        context.get_per_replica_batch_size(13)
    assert isinstance(e.value, BatchError)
    assert "Got: global_batch_size=13" in str(e.value)
    assert "Fix: use 12 or 18" in str(e.value)
    with pytest.raises(BatchError, match="Fix: use 6$"):
        context.get_per_replica_batch_size(4)


@pytest.mark.parametrize("size", ["12", 12.0, -6, True, None])
def test_a_global_batch_size_that_is_no_count(size):
    context = dj.InputContext(num_replicas_in_sync=6)
    with pytest.raises(BatchError, match="^get_per_replica_batch_size: global_batch_size needs"):
        context.get_per_replica_batch_size(size)
    assert context.get_per_replica_batch_size(np.int64(12)) == 2


def test_input_context_as_text():
    assert str(dj.InputContext()) == "tf.distribute.InputContext(input pipeline id 0, total: 1)"
    assert dj.InputContext() == dj.InputContext(1, 0, 1)


def test_options_are_frozen_values():
    options = dj.InputOptions()
    assert (options.partial, options.prefetch) == ("error", 2)
    assert options == dj.InputOptions("error", 2, "rows", True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.prefetch = 3


@pytest.mark.parametrize("partial", ["Pad", None, 1, ""])
def test_partial_is_one_of_three_words(partial):
    with pytest.raises(ValueError, match="partial=...\\) needs 'error', 'drop' or 'pad'"):
        dj.InputOptions(partial=partial)


@pytest.mark.parametrize("shard", ["Rows", None, 1, True])
def test_shard_is_one_of_two_words(shard):
    with pytest.raises(ValueError, match="shard=...\\) needs 'rows' or 'own'"):
        dj.InputOptions(shard=shard)


@pytest.mark.parametrize("prefetch", [-1, 1.0, True, None])
def test_prefetch_is_a_count(prefetch):
    with pytest.raises(ValueError, match="prefetch=...\\) needs an int of 0 or more"):
        dj.InputOptions(prefetch=prefetch)


@pytest.mark.parametrize("copy", [0, None, "no"])
def test_copy_is_true_or_false(copy):
    with pytest.raises(ValueError, match="copy=...\\) needs True or False"):
        dj.InputOptions(copy=copy)


@pytest.mark.parametrize("method", ["distribute_dataset", "distribute_datasets_from_function"])
@pytest.mark.parametrize("options", ["pad", {"partial": "pad"}])
def test_options_need_their_type(strategy, method, options):
    with pytest.raises(TypeError, match=f"^{method} needs options=dj.InputOptions"):
        getattr(strategy, method)([np.zeros(24)], options)


def test_batch_is_a_pytree_and_an_argument_of_run(pair):
    batch = dj.Batch({"x": np.ones(2)}, np.array([True, False]))
    doubled = jax.tree.map(lambda leaf: leaf + leaf, batch)
    assert isinstance(doubled, dj.Batch)
    np.testing.assert_array_equal(doubled.data["x"], [2, 2])

    def count(batch):
        assert isinstance(batch, dj.Batch)
        return (batch.data["x"] * batch.mask).sum()

    assert float(pair.run(count, args=(batch,))) == 1.0
