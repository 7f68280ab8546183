"""A module that many attributes lead to is found, or refused in words that name it."""

import jax.numpy as jnp
import pytest
from flax import nnx

import distjax as dj


class Counter(nnx.Module):
    def __init__(self):
        self.count = nnx.Variable(jnp.zeros(2))


class Holder:
    """An object of the user's."""


def held_deep(module, depth):
    """Returns an object from which `depth` attributes lead to the module."""
    for _ in range(depth):
        holder = Holder()
        holder.inner = module
        module = holder
    return module


def innermost(holder):
    while isinstance(holder, Holder):
        holder = holder.inner
    return holder


@pytest.mark.parametrize("how", ["run", "jit"])
@pytest.mark.parametrize("form", ["captured", "argument"])
@pytest.mark.parametrize("depth", [1, 3, 4, 5, 8])
def test_a_module_deep_in_an_object(depth, form, how):
    strategy, counter = dj.VirtualStrategy(2), Counter()
    holder = held_deep(counter, depth)

    def captured(x):
        innermost(holder).count[...] += x

    def argument(given, x):
        innermost(given).count[...] += x

    fn, given = (captured, ()) if form == "captured" else (argument, (holder,))

    def step(*args):
        strategy.run(fn, args=args)

    call = dj.jit(step) if how == "jit" else step
    try:
        call(*given, jnp.ones(2))
        call(*given, jnp.ones(2))
    except dj.errors.TraceLeakError as error:
        assert depth > 3  # what was found before is found
        assert "captured where distjax can see it" in str(error).splitlines()[0]
        assert counter.count[...].tolist() == [0, 0]
    else:
        assert counter.count[...].tolist() == [2, 2]
