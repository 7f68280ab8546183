"""A value that was read belongs to the user, who may donate or delete it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.faults.four_parts import fix_of, is_explained

USES = {
    "read": lambda strategy, w: w.value,
    "number": lambda strategy, w: np.asarray(w),
    "components": lambda strategy, w: w.local_results(),
    "add": lambda strategy, w: w.assign_add(jnp.ones(4)),
    "step_reads": lambda strategy, w: strategy.run(lambda: w.value + 1),
    "step_writes": lambda strategy, w: strategy.run(lambda: (w.assign_add(jnp.ones(4)), None)[1]),
    "jit": lambda strategy, w: dj.jit(lambda: w.value + 1)(),
}
TAKES = {
    "donated": lambda w: jax.jit(lambda x: x + 1, donate_argnums=0)(w.value),
    "deleted": lambda w: w.value.delete(),
}


def make(strategy):
    with strategy.scope():
        return dj.Variable(jnp.arange(4.0), name="w", aggregation=dj.VariableAggregation.MEAN)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("take", TAKES)
def test_a_use_of_a_value_that_jax_took_says_which_variable_and_what_to_do(pair, take, use):
    w = make(pair)
    TAKES[take](w)
    with pytest.raises(Exception) as caught:  # its class is for the one who mends this
        USES[use](pair, w)
    assert is_explained(caught.value)
    assert "'w'" in str(caught.value)
    assert "jnp.copy(v.value)" in fix_of(caught.value)


@pytest.mark.parametrize("take", TAKES)
def test_a_variable_whose_value_jax_took_can_be_assigned(pair, take):
    w = make(pair)
    TAKES[take](w)
    w.assign(jnp.ones(4))
    np.testing.assert_array_equal(w.value, np.ones(4))


def test_a_state_donated_to_dj_jit_leaves_the_variable_that_it_was_read_from(pair):
    w = make(pair)
    step = dj.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = step({"w": w.value, "b": jnp.zeros(4)})
    np.testing.assert_array_equal(state["w"], np.arange(4.0) + 1)
    np.testing.assert_array_equal(w.value, np.arange(4.0))


def test_a_state_held_and_donated_twice_leaves_the_variable(pair):
    w = make(pair)
    step = dj.jit(lambda x: pair.run(lambda x: x + 1, args=(x,)), donate_argnums=0)
    held = w.value
    step(w.value)
    step(w.value)
    np.testing.assert_array_equal(w.value, np.arange(4.0))
    np.testing.assert_array_equal(held, np.arange(4.0))


def test_a_step_may_write_a_variable_and_donate_its_value(pair):
    w = make(pair)

    def fn(x):
        w.assign_add(x)
        return x + 1

    result = dj.jit(fn, donate_argnums=0)(w.value)
    np.testing.assert_array_equal(result, np.arange(4.0) + 1)
    np.testing.assert_array_equal(w.value, 2 * np.arange(4.0))
