"""One variable at several keys of a tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import CheckpointError

NAN = np.nan


def test_two_values_for_one_variable(checkpointer, pair):
    with pair.scope():
        v, other = dj.Variable(np.zeros(2, np.float32), name="v"), dj.Variable(0.0)
    saved = {"a": 1.0, "emb": np.float32([1, 1]), "head": np.float32([1, 2])}
    checkpointer.save(1, saved)
    with pytest.raises(CheckpointError) as error:
        checkpointer.restore({"a": other, "emb": v, "head": v})
    assert str(error.value) == (
        f"'emb' and 'head' of the checkpoint of step 1 in {checkpointer.directory!r} need one "
        "value, for variable 'v'.\n"
        "  Got: two values that differ.\n"
        "  Why: the tree has one variable at both keys: one of the values would be lost. Nothing "
        "has been changed.\n"
        "  Fix: a variable for each key; or leave one of them out: restore(tree without 'head', "
        "partial=True)"
    )
    assert v.value.tolist() == [0, 0] and float(other.value) == 0
    checkpointer.restore({"emb": v}, partial=True)
    assert v.value.tolist() == [1, 1]


@pytest.mark.parametrize("partition", ["optimizer", "parameters"])
def test_two_values_for_one_variable_that_is_split(checkpointer, partition):
    strategy = dj.ShardedStrategy(jax.devices()[:2], partition=partition, min_split_bytes=0)
    with strategy.scope():
        v = dj.Variable(np.zeros(4, np.float32))
    checkpointer.save(1, [np.float32([1, 2, 3, 4]), np.float32([1, 2, 3, 5])])
    with pytest.raises(CheckpointError, match="^'0' and '1' of the checkpoint of step 1 in "):
        checkpointer.restore([v, v])


@pytest.mark.parametrize(
    "values",
    [
        (np.float32([1, NAN]), np.float32([1, NAN])),
        (np.float32([1, 2]), np.int32([1, 2])),  # equal in the dtype of the variable
        (jax.random.key(7), jax.random.key(7)),
        (jnp.bfloat16(3), jnp.bfloat16(3)),
        (np.zeros((0, 2)), np.zeros((0, 2))),
    ],
    ids=["nan", "dtypes", "keys", "bfloat16", "empty"],
)
def test_equal_values_for_one_variable(checkpointer, values):
    v = dj.Variable(jnp.zeros_like(values[0]))
    checkpointer.save(1, {"emb": values[0], "head": values[1]})
    checkpointer.restore({"emb": v, "head": v})
    if v.dtype == jnp.float32:
        np.testing.assert_array_equal(v.value, values[0])
    else:
        assert bool((v.value == values[0]).all())


def test_keys_that_differ(checkpointer):
    v = dj.Variable(jax.random.key(0))
    checkpointer.save(1, [jax.random.key(1), jax.random.key(2)])
    with pytest.raises(CheckpointError, match="^'0' and '1' of .* need one value, for variable"):
        checkpointer.restore([v, v])
