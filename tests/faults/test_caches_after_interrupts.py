"""An interrupt in one of JAX's caches does not make a function unusable for ever."""

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj
from tests.interrupts import campaign, in_packages

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
_IN_CACHES = in_packages("jax._src.util")


def is_asked_by_a_cache(frame):
    """Says whether a frame is of a lambda that a cache of JAX calls as it makes an entry."""
    return frame.f_code.co_name == "<lambda>" and _IN_CACHES(frame)


def test_a_call_after_an_interrupted_first_one_works(mirrored):
    def make():
        with mirrored.scope():
            v = dj.Variable(jnp.zeros(3), aggregation=dj.VariableAggregation.MEAN)

        def step(x):
            v.assign_add(x)

        call = lambda x: mirrored.run(step, args=(x,))
        return (v, call), lambda: call(jnp.ones(3))

    def check(case, _):
        v, call = case
        call(jnp.ones(3))
        value = np.asarray(v.value).tolist()
        assert value in ([1] * 3, [2] * 3), value

    campaign(make, check, is_asked_by_a_cache, stride=3, limit=300)
