"""Which objects Flax made outside of traces."""

import importlib.util

import jax
from flax import nnx

from distjax._src.flax import graphs


def load_anew():
    """Runs the module once more, under a name of its own."""
    spec = importlib.util.spec_from_file_location("trace_level_anew", graphs.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_first_import_inside_a_trace_knows_the_outside():
    loaded = []

    def step(x):
        loaded.append(load_anew())
        inner = nnx.Param(x)
        return x + loaded[0].is_outside(inner)

    assert int(jax.jit(step)(1)) == 1  # what a trace makes is not outside
    assert loaded[0].is_outside(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
