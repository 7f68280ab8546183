"""Variables made inside a traced function: their storage, when the trace has ended."""

import jax
import jax.numpy as jnp
import numpy as np

import distjax as dj


def make_once(make):
    """Returns a function that makes variables at its first call, and the list of them."""
    made = []

    def fn(x):
        if not made:
            made.extend(make(x))
        return x

    return fn, made


def test_split_variables_are_computed_split():
    strategy = dj.ShardedStrategy(jax.devices()[:4], partition="parameters", min_split_bytes=0)
    fn, made = make_once(lambda x: [dj.Variable(jnp.zeros(8) + x)])
    strategy.run(fn, args=(jnp.float32(3),))
    (v,) = made
    assert dj.locality(v).kind == "partitioned"
    assert [s.data.shape for s in v.storage.addressable_shards] == [(2,)] * 4
    np.testing.assert_array_equal(v.value, np.full(8, 3.0))


def test_variables_of_two_strategies_in_one_function():
    mirrored = dj.MirroredStrategy(jax.devices()[:2])
    other = dj.OneDeviceStrategy(jax.devices()[3])

    def make(x):
        with mirrored.scope():
            a = dj.Variable(jnp.ones(3) + x)
        with other.scope():
            b = dj.Variable(jnp.ones(3) * 5)
        return [a, b]

    fn, made = make_once(make)
    dj.jit(fn)(jnp.float32(1))
    a, b = made
    np.testing.assert_array_equal(a.value, [2.0, 2.0, 2.0])
    np.testing.assert_array_equal(b.value, [5.0, 5.0, 5.0])
    assert a.storage.sharding.device_set == set(jax.devices()[:2])
    assert b.storage.sharding.device_set == {jax.devices()[3]}


def test_an_initial_value_that_is_an_argument_is_copied(pair):
    x = jax.device_put(jnp.arange(4.0), pair.extended.topology.mirrored)
    fn, made = make_once(lambda x: [dj.Variable(x, aggregation=dj.VariableAggregation.MEAN)])
    pair.run(fn, args=(x,))
    pair.run(lambda: made[0].assign_add(jnp.ones(4)))  # donates the variable's buffer
    np.testing.assert_array_equal(x, np.arange(4.0))
    np.testing.assert_array_equal(made[0].value, np.arange(4.0) + 1)


def test_an_argument_that_lives_elsewhere(mirrored):
    x = jax.device_put(jnp.arange(4.0), jax.devices()[5])
    fn, made = make_once(lambda x: [dj.Variable(2 * x)])
    mirrored.run(fn, args=(x,))
    np.testing.assert_array_equal(made[0].value, 2 * np.arange(4.0))


def test_empty_and_per_replica_variables_and_keys(pair):
    modes = {
        "synchronization": dj.VariableSynchronization.ON_READ,
        "aggregation": dj.VariableAggregation.SUM,
    }

    def make(x):
        empty, key = dj.Variable(jnp.zeros((0, 3))), dj.Variable(jax.random.key(7))
        return [empty, key, dj.Variable(x * jnp.ones(2), **modes)]

    fn, made = make_once(make)
    pair.run(fn, args=(jnp.float32(3),))
    empty, key, total = made
    assert empty.value.shape == (0, 3)
    assert (
        jax.random.key_data(key.value).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
    )
    assert [c.tolist() for c in total.local_results()] == [[3.0, 3.0], [3.0, 3.0]]
