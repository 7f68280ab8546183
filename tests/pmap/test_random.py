"""Random functions beside `jax.pmap`: a few here, `make fuzz SEEDS=500` for many."""

import os

import jax
import numpy as np
import pytest

import distjax as dj
from tests.pmap.programs import Program

SEEDS = int(os.environ.get("FUZZ_SEEDS", "6"))


def assert_close(found, expected, program):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        scale = max(1.0, float(np.abs(y).max()))
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-4 * scale, err_msg=str(program))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_as_jax_pmap(seed):
    program = Program(seed)
    arguments = program.arguments()
    axes = {"in_axes": program.in_axes, "out_axes": program.out_tree}
    devices = jax.devices()[: program.count]
    expected = jax.pmap(program, "i", devices=devices, **axes)(*arguments)
    assert_close(dj.pmap(program, "i", **axes)(*arguments), expected, seed)
    virtual = dj.VirtualStrategy(program.count, axis_name="i")
    assert_close(dj.pmap(program, "i", strategy=virtual, **axes)(*arguments), expected, seed)
