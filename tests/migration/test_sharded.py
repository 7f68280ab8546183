"""Four files with tensor parallelism or FSDP, ported: the same numbers in no more memory."""

import warnings

import jax
import numpy as np
import pytest

import distjax as dj
from tests.drill_mark import all_drills_but
from tests.migration import sharded_ports as ports

NUM_STEPS = 3
#: Lines that a port may change: those of gemma make a functional state into objects.
MOST_CHANGED = {"nnx_fsdp": 10, "nnx_gemma": 36, "linen_lm": 17, "equinox_gpt": 10}


@pytest.mark.parametrize("name", all_drills_but(["nnx_fsdp"], ports.CHANGES))
def test_a_port_computes_the_same_in_no_more_memory(name):
    module = ports.load(ports.port_of(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found, step, args = module.main(NUM_STEPS)
    expected, *published = ports.load(ports.source_of(name)).main(NUM_STEPS)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (np.shape(x), np.asarray(x).dtype) == (np.shape(y), np.asarray(y).dtype)
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-6)
    held, temporary = ports.memory_of(step, args, module.strategy)
    held_there, temporary_there = ports.memory_of(*published)
    assert held == held_there
    assert temporary <= temporary_there
    is_compiled = isinstance(step, type(dj.jit(len)))
    dj.check(step, *args, strategy=None if is_compiled else module.strategy)


@pytest.mark.parametrize("name", ports.CHANGES)
def test_few_lines_change(name):
    assert ports.changed_lines(name) <= MOST_CHANGED[name]
    assert "distjax" not in ports.source_of(name)
