"""A checkpoint of unsigned four-bit integers is written, or refused for what it is."""

import jax.numpy as jnp
import numpy as np

import distjax as dj
from distjax.errors import CheckpointError
from tests.faults.four_parts import is_explained


def saved_and_restored(strategy, checkpointer, dtype):
    """Returns [0, 1, 2, 3] of a variable after it was saved, zeroed and restored."""
    with strategy.scope():
        v = dj.Variable(jnp.arange(4).astype(dtype), name="v")
    checkpointer.save(1, {"v": v})
    checkpointer.wait()
    v.assign(jnp.zeros(4, dtype))
    checkpointer.restore({"v": v})
    assert v.value.dtype == dtype
    return np.asarray(v.value).astype(int).tolist()


def test_uint4_is_restored_or_the_error_names_the_dtype(pair, checkpointer):
    try:
        values = saved_and_restored(pair, checkpointer, jnp.uint4)
    except CheckpointError as error:
        assert is_explained(error)
        assert "'v'" in str(error) and "uint4" in str(error) and "disk" not in str(error)
    else:
        assert values == [0, 1, 2, 3]


def test_int4_is_restored(pair, checkpointer):
    assert saved_and_restored(pair, checkpointer, jnp.int4) == [0, 1, 2, 3]
