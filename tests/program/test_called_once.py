"""A function that raises is not called again: its error is not one that another way would cure."""

import copy

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj

MAKERS = {
    "dj.jit": lambda strategy, fn: dj.jit(fn),
    "strategy.jit": lambda strategy, fn: strategy.jit(fn),
    "run": lambda strategy, fn: lambda x: strategy.run(fn, args=(x,)),
    "lower": lambda strategy, fn: dj.jit(fn).lower,
}
KINDS = (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit)


def _raise(error):
    raise error


RAISING = {
    "its own": lambda x: _raise(ValueError("mine")),
    "a key": lambda x: _raise(KeyError("k")),
    "an assertion": lambda x: _raise(AssertionError),
    "of JAX": lambda x: jnp.dot(x, jnp.ones((7, 3))),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", MAKERS)
@pytest.mark.parametrize("what", RAISING)
def test_a_function_that_raises_under_a_mesh_is_traced_once(what, way, kind):
    traces = []
    fn = lambda x: traces.append(0) or RAISING[what](x)
    call = MAKERS[way](dj.MirroredStrategy(jax.devices()[:2]), fn)
    with jax.set_mesh(jax.make_mesh((2,), ("m",), axis_types=(kind,))):
        with pytest.raises((ValueError, KeyError, AssertionError, TypeError)):
            call(np.ones(4, np.float32))
    assert len(traces) == 1


class Adder:
    """Has a compiled method."""

    def __init__(self, strategy):
        self.by, self.compiled = 1.0, strategy.jit(self.add)

    def add(self, x):
        return x + self.by


def test_a_deep_copy_of_a_strategys_compiled_function_compiles_anew():
    strategy = dj.MirroredStrategy(jax.devices()[:2])
    add = strategy.jit(lambda x: x + 1)
    assert float(copy.deepcopy(add)(np.float32(1))) == float(add(np.float32(1))) == 2
    adder = Adder(strategy)
    other = copy.deepcopy(adder)
    other.by = 5.0
    assert float(other.compiled(np.float32(1))) == 6
    assert float(adder.compiled(np.float32(1))) == 2


def test_donated_arguments_are_said_to_be_gone_only_if_they_are():
    log = dj.jit(jnp.log, donate_argnums=0)
    for first in (True, False):
        x = jnp.full(3, -1.0)
        with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
            log(x)
        assert ("are gone" in str(caught.value)) == x.is_deleted()
        if first:
            log(jnp.ones(3))


@pytest.mark.parametrize("way", ["dj.jit", "strategy.jit", "run"])
@pytest.mark.parametrize("make", [dj.OneDeviceStrategy, lambda: dj.VirtualStrategy(2)])
def test_a_warm_call_whose_callback_raises_has_run_once(make, way):
    """A second launch would swallow the error, and do twice whatever else the step does."""
    seen = []

    def callback(x):
        seen.append(float(x))
        if len(seen) == 5:
            raise ValueError("mine")
        return np.float32(x)

    strategy = make()
    fn = lambda x: jax.experimental.io_callback(callback, jax.ShapeDtypeStruct((), jnp.float32), x)
    if way == "dj.jit":
        call = dj.jit(fn)
    else:
        call = MAKERS[way](strategy, fn)
    num_each = 1 if way == "dj.jit" else strategy.num_replicas_in_sync
    with pytest.raises(Exception, match="mine"):
        for _ in range(5):
            jax.block_until_ready(jax.tree.leaves(call(jnp.float32(1))))
    assert 5 <= len(seen) < 5 + num_each
