"""Workers, servers and the user's process on different devices: programs name none of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.servers.serial import SerialStrategy


@pytest.mark.parametrize("cut", ["arguments", "least_bytes"])
def test_what_lies_somewhere_is_used_by_all(cut):
    strategy = SerialStrategy(2, cut=cut)  # servers at the last devices
    with strategy.scope():
        v, w = dj.Variable(jnp.zeros(3), name="v"), dj.Variable(jnp.ones(3), name="w")
    committed = jax.device_put(jnp.arange(3.0), jax.devices()[3])
    key = jax.random.key(1)

    def merge(strategy, x):
        extended = strategy.extended
        total = extended.reduce_to("sum", x, v) + committed
        v.assign_add(extended.broadcast_to(total))
        w.assign_sub(jax.random.uniform(key, (3,)) * 0 + strategy.reduce("mean", x))
        return extended.broadcast_to(x)

    def step(x):
        x = jax.device_put(x + committed, jax.devices()[0])
        noise = jax.random.normal(key, (3,)) * 0
        return dj.get_replica_context().merge_call(merge, args=(x + noise,)) + v.value

    for device in (5, 0):
        x = jax.device_put(jnp.ones(3), jax.devices()[device])
        result = strategy.run(step, args=(x,))
        v.assign(jnp.zeros(3))
    np.testing.assert_array_equal(w.value, [-1.0, -3.0, -5.0])
    np.testing.assert_array_equal(result, [2.0, 5.0, 8.0])
