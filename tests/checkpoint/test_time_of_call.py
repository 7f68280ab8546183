"""A save holds the values at the time of the call, whatever training does meanwhile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.checkpoint.storages import STORAGES

SIZE = 1 << 18  # large enough that the writing goes on while the next steps run


@pytest.mark.parametrize("name", ["mirrored2", "virtual4", "zero3", "central"])
def test_steps_that_donate_the_variable(name, checkpointer):
    strategy = STORAGES[name]()
    with strategy.scope():
        v = dj.Variable(jnp.zeros(SIZE))
    step = dj.jit(lambda: v.assign_add(jnp.ones(SIZE)))
    step()
    for number in (1, 2):
        checkpointer.save(number, {"v": v})
        for _ in range(3):
            step()
    assert float(v.value[0]) == 7.0
    for number, expected in ((1, 1.0), (2, 4.0)):
        restored = checkpointer.restore({"v": np.zeros(SIZE, np.float32)}, number)["v"]
        assert set(np.unique(restored)) == {expected}


def test_a_user_who_donates_an_array(checkpointer):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(jnp.zeros(SIZE))
    checkpointer.save(1, {"x": x})
    for _ in range(3):
        x = step(x)
    restored = checkpointer.restore({"x": x})["x"]
    assert set(np.unique(restored)) == {1.0}


def test_a_numpy_array_that_is_written_to(checkpointer):
    x = np.ones(SIZE, np.float32)
    checkpointer.save(1, {"x": x})
    x[:] = 2.0
    assert set(np.unique(checkpointer.restore({"x": x})["x"])) == {1.0}


def test_a_restored_variable_does_not_share_the_restored_array(checkpointer, pair):
    """A step donates the variable's buffer; what was restored beside it stays."""
    with pair.scope():
        v = dj.Variable(jnp.zeros(4))
    checkpointer.save(1, {"v": jnp.ones(4), "x": jnp.ones(4)})
    restored = checkpointer.restore({"v": v, "x": jnp.zeros(4)})
    dj.jit(lambda: v.assign_add(jnp.ones(4)))()
    assert (v.value[0], restored["x"][0]) == (2.0, 1.0)
