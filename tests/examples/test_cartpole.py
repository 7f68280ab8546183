"""The cart and pole: its physics in closed form, and that it is learned."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.examples.scripts import EXAMPLES, last_line

HALF_LENGTH, SECONDS = 0.5, 0.02


@pytest.fixture(scope="module")
def cartpole():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / "cartpole"))
        import cartpole

        return cartpole


def test_a_pushed_cart_accelerates_and_tips_the_pole_back(cartpole):
    """At rest and upright: Barto, Sutton and Anderson's equations, by hand."""
    _, velocity, _, spin = np.asarray(cartpole.step(jnp.zeros((1, 4)), jnp.array([True])))[0]
    push = 10.0 / 1.1
    angular = -push / (HALF_LENGTH * (4 / 3 - 0.1 / 1.1))
    linear = push - 0.1 * HALF_LENGTH * angular / 1.1
    np.testing.assert_allclose([velocity, spin], [SECONDS * linear, SECONDS * angular], rtol=1e-6)


def test_a_pole_out_of_bounds_is_down(cartpole):
    states = jnp.array([[0.0, 0, 0, 0], [2.5, 0, 0, 0], [0, 0, 0.3, 0], [0, 9, 0.1, 9]])
    assert cartpole.is_up(states).tolist() == [True, False, False, True]


@pytest.mark.drill
def test_it_learns_to_balance():
    """45 steps in four calls and a half; the pole of a random policy stays up for about 22."""
    line = last_line("cartpole/train.py", "--replicas", "2", "--steps", "45")
    name, steps = line.split(": ")
    assert name == "mirrored" and float(steps.split()[0]) > 100
