"""What a new function leaves in JAX's caches: at most twice what it leaves of `jax.jit`."""

import collections
import gc

import jax
import jax.numpy as jnp
import pytest

import distjax as dj
from tests.conftest import collect_and_freeze

NUM_CALLS = 10
#: The growth is a whole number of objects for each call; a few more are made once in all.
MADE_ONCE = 5

#: The entries of JAX's caches, by the names of their classes.
KINDS = ("Jaxpr", "InferParamsCacheEntry")

WAYS = {
    "mirrored": lambda: dj.MirroredStrategy(jax.devices()[:2]).run,
    "virtual": lambda: dj.VirtualStrategy(2).run,
    "jit": lambda: lambda fn, args: dj.jit(fn)(*args),
}


def growth(call):
    """Returns how many objects of each kind ``call(fn, args)`` leaves of new functions."""
    args = (jnp.ones(4),)

    def call_new_function():
        # Steps of it are functions that jax.numpy compiles itself.
        call(lambda x: jnp.clip(jnp.where(x > 0, x, 0.5), 0, 1) + 1, args)

    for _ in range(3):
        call_new_function()
    collect_and_freeze()  # what is there already is not looked at, and not counted
    for _ in range(NUM_CALLS):
        call_new_function()
    gc.collect()
    left = collections.Counter(type(x).__name__ for x in gc.get_objects())
    return {kind: left[kind] for kind in KINDS}


@pytest.fixture(scope="module")
def plain():
    return growth(lambda fn, args: jax.jit(fn)(*args))


@pytest.mark.filterwarnings("ignore::distjax.errors.RecompilationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_new_function(way, plain):
    ours = growth(WAYS[way]())
    too_many = {k: ours[k] for k in KINDS if ours[k] > 2 * plain[k] + MADE_ONCE}
    assert too_many == {}
