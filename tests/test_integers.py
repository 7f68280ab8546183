"""What counts as an integer."""

import numpy as np
import pytest

from distjax.integers import is_int


@pytest.mark.parametrize("value", [0, -3, np.int64(2), np.uint8(2)])
def test_ints_of_python_and_numpy_are(value):
    assert is_int(value)


@pytest.mark.parametrize("value", [True, np.bool_(True), 2.0, np.float32(2), "2", None, np.ones(1)])
def test_others_are_not(value):
    assert not is_int(value)
