"""Static attributes that no program can be compiled for are named."""

import jax.numpy as jnp
import pytest
from flax import nnx

import distjax as dj
from distjax.errors import TraceLeakError


class Box(nnx.Module):
    """Holds a parameter and one static attribute."""

    def __init__(self, static):
        self.weight = nnx.Param(jnp.ones(2))
        self.static = nnx.static(static)


@pytest.mark.parametrize("value", [[1, 2], {1}, {"a": 1}], ids=["list", "set", "dict"])
def test_a_static_attribute_that_is_not_hashable(mirrored, value):
    text = r"^Box\.static needs a static value that is hashable"
    with pytest.raises(TypeError, match=text):
        mirrored.run(lambda box: box.weight[...], args=(Box(value),))
    with pytest.raises(TypeError, match=text):
        dj.jit(lambda box: box.weight[...])(Box(value))


def test_metadata_that_is_not_hashable(mirrored):
    box = Box(0)
    box.weight.set_metadata(tags=["a"])
    for argument, owner in ((box, "Box.weight"), (nnx.state(box), "Param")):
        text = rf"^{owner} needs metadata that is hashable\.\n  Got: tags=list"
        with pytest.raises(TypeError, match=text):
            mirrored.run(lambda box: 0, args=(argument,))
    box.weight.set_metadata(tags=("a",))
    assert mirrored.run(lambda box: box.weight[...], args=(box,)).shape == (2,)


def test_an_array_of_a_step_as_a_static_attribute(mirrored, how):
    box = Box(0)

    def set_new(box, x):
        box.seen = x * 2

    def set_static(box, x):
        box.static = (x, 1)

    for fn, name in ((set_new, "seen"), (set_static, "static")):
        step = how(lambda box, x, fn=fn: mirrored.run(fn, args=(box, x)))
        with pytest.raises(TraceLeakError, match=rf"^Box\.{name} needs to be a variable to hold"):
            step(box, jnp.float32(1))
    assert not hasattr(box, "seen") and box.static == 0
