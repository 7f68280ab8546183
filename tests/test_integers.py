"""What counts as an integer."""

import numpy as np
import pytest

from distjax.errors import is_int, require_int


@pytest.mark.parametrize("value", [0, -3, np.int64(2), np.uint8(2)])
def test_ints_of_python_and_numpy_are(value):
    assert is_int(value)


@pytest.mark.parametrize("value", [True, np.bool_(True), 2.0, np.float32(2), "2", None, np.ones(1)])
def test_others_are_not(value):
    assert not is_int(value)


def test_a_required_int_becomes_one_of_python():
    assert type(require_int("n", np.int64(2), 1, why="it counts", fix="f(n=2)")) is int


@pytest.mark.parametrize("value", [0, True, 2.0, None])
def test_what_is_no_such_int(value):
    with pytest.raises(ValueError, match="^f: n needs an int of 1 or more"):
        require_int("f: n", value, 1, why="it counts", fix="f(n=2)")
