"""A masked array of numpy is refused wherever `np.asarray` would drop its mask."""

import numpy as np
import pytest

import distjax as dj
from distjax.errors import BatchError

MASKED = np.ma.masked_array(np.full(8, 1e9, np.float32), mask=[True] * 8)


TAKES_AN_ARRAY = {
    "broadcast_to": lambda strategy, x: strategy.extended.broadcast_to(x),
    "distribute_values_from_function": (
        lambda strategy, x: strategy.distribute_values_from_function(lambda context: x)
    ),
    "variable 'v'": lambda strategy, x: dj.Variable(x, name="v"),
    "assign of variable 'v'": (
        lambda strategy, x: dj.Variable(np.zeros(8, np.float32), name="v").assign(x)
    ),
}


@pytest.mark.parametrize("what", TAKES_AN_ARRAY)
def test_a_mask_is_not_dropped(pair, what):
    with pytest.raises(ValueError) as caught, pair.scope():
        TAKES_AN_ARRAY[what](pair, MASKED)
    assert str(caught.value).splitlines() == [
        f"{what} needs an array without a mask.",
        "  Got: MaskedArray of shape (8,) and dtype float32.",
        "  Why: JAX has no masked arrays: the values under the mask would count.",
        "  Fix: x.filled(0), or x.data and x.mask as two arrays",
    ]


@pytest.mark.parametrize("is_function", [False, True])
def test_a_mask_of_a_batch_is_not_dropped(pair, is_function):
    dataset = (
        pair.distribute_datasets_from_function(lambda context: [MASKED] * 2)
        if is_function
        else pair.distribute_dataset([MASKED])
    )
    with pytest.raises(BatchError) as caught:
        next(iter(dataset))
    assert "0 needs arrays of numbers, leaf (the element itself) is" in str(caught.value)
    assert "Got: MaskedArray of shape (8,) and dtype float32." in str(caught.value)


def test_a_mask_is_not_dropped_when_it_is_saved(tmp_path):
    with dj.checkpoint.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(ValueError, match="^a value that is saved needs an array"):
            checkpointer.save(1, {"x": MASKED})
