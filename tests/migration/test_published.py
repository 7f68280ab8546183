"""Six whole training files do under `dj.pmap` what they do under `jax.pmap`."""

import warnings

import jax
import numpy as np
import pytest

import distjax as dj
from tests.migration import ports

NUM_STEPS = 5


@pytest.mark.parametrize("name", ports.CHANGES)
def test_a_published_file_computes_the_same(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error", dj.errors.LocalityWarning)
        found = ports.run(ports.port_of(name), NUM_STEPS)
    expected = ports.run(ports.source_of(name), NUM_STEPS)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (np.shape(x), np.asarray(x).dtype) == (np.shape(y), np.asarray(y).dtype)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ports.CHANGES)
def test_a_port_changes_three_lines_at_most(name):
    assert 2 <= ports.changed_lines(name) <= 3
    assert "dj.pmap" in ports.port_of(name) and "distjax" not in ports.source_of(name)
