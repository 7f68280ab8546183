"""What tells the watch of a job that a program has completed: a result of it, or a token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distjax._src.collectives import eager
from distjax._src.program import launch
from distjax._src.program.discovery import _find_completion

LARGE, KEY = jnp.ones(257), jax.random.key(0)


@pytest.mark.parametrize(
    "results, told",
    [
        (lambda x: [x.sum()], 0),
        (lambda x: [x.sum(), jnp.ones(1000)], 0),
        (lambda x: [x, x.astype(jnp.int32), x.sum()], 2),
        (lambda x: [], None),
        (lambda x: [x], None),
        (lambda x: [LARGE + x[0]], None),
        (lambda x: [jax.random.fold_in(KEY, 1)], None),
        (lambda x: [x.astype(jnp.int32)], None),
        (lambda x: [np.float32(2), x.sum()], 1),
    ],
    ids=[
        "loss",
        "more",
        "after others",
        "none",
        "an input",
        "large",
        "key",
        "donated next",
        "const",
    ],
)
def test_which_result_tells_the_end(results, told):
    """JAX hands an input on at once; what is large would be held, what is donated is gone."""
    found = []

    @jax.jit
    def program(x):
        made = results(x)
        found.append(_find_completion(made, {"x": x}, donated=[jnp.zeros(3, jnp.int32)]))
        return made

    program(jnp.ones(3))
    assert found == [told]


@pytest.mark.parametrize("results", [lambda x: x + 1, lambda x: jnp.tile(x, 300)])
def test_a_token_where_no_result_does(mirrored, monkeypatch, results):
    """Where programs are throttled; else a program has no token, and nobody asks for its end."""
    seen = []
    monkeypatch.setattr(launch, "throttle", seen.append)
    out = mirrored.run(results, args=(mirrored.per_replica(jnp.ones(2)),)).stacked
    if not eager.is_throttled():
        assert seen == []
    elif out.size < 256:
        assert seen == [out]
    else:
        [token] = seen
        assert (token.shape, token.dtype) == ((), jnp.int8)
