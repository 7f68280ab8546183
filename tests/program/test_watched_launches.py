"""What tells the watch of a job that a program has completed: a result of it, or a token."""

import jax
import jax.numpy as jnp
import pytest

from distjax.collectives import throttle
from distjax.program.build import _tells_the_end

LARGE, KEY = jnp.ones(257), jax.random.key(0)


@pytest.mark.parametrize(
    "results, told",
    [
        (lambda x: [x.sum()], True),
        (lambda x: [x.sum(), jnp.ones(1000)], True),
        (lambda x: [], False),
        (lambda x: [x], False),
        (lambda x: [LARGE + x[0]], False),
        (lambda x: [jax.random.fold_in(KEY, 1)], False),
        (lambda x: [x.astype(jnp.int32)], False),
    ],
    ids=["loss", "more after it", "none", "an input", "large", "key", "donated next"],
)
def test_which_result_tells_the_end(results, told):
    """JAX hands an input on at once; what is large would be held, what is donated is gone."""
    found = []

    @jax.jit
    def program(x):
        made = results(x)
        found.append(_tells_the_end(made, {"x": x}, donated=[jnp.zeros(3, jnp.int32)]))
        return made

    program(jnp.ones(3))
    assert found == [told]


def test_a_token_where_no_result_does():
    assert throttle.make_token(True).is_ready() in (True, False)
    assert (throttle.make_token() is None) == (not throttle.is_throttled())
