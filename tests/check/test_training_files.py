"""Whole training steps: nothing is found in them, and a slip of a port is."""

import pytest

import distjax as dj
from tests.check.problem import RULE, R, batch_of, findings_of, is_right
from tests.check.training_files import FILES

pytest.importorskip("flax")


@pytest.mark.parametrize("file", FILES)
def test_a_right_step(file):
    step, arrays, rest = file()
    strategy = dj.VirtualStrategy(R)
    assert is_right(step, *batch_of(strategy, *arrays), *rest, strategy=strategy)


@pytest.mark.parametrize("file", FILES)
def test_a_step_with_a_slip(file):
    step, arrays, rest = file(slip=True)
    strategy = dj.VirtualStrategy(R)
    found = findings_of(step, *batch_of(strategy, *arrays), *rest, strategy=strategy)
    assert RULE in [f.rule for f in found]
