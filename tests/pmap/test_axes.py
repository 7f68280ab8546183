"""Where the mapped axis stands in arguments and results, and what is not mapped."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import distjax as dj
from tests.pmap.kinds import Replicas, assert_equal


def test_axes_of_arguments_and_results(replicas):
    n = replicas.count
    x, y = replicas.rows(2, 4).transpose(1, 0, 2), replicas.rows(2, 4).transpose(1, 2, 0)
    fn = lambda x, y: jnp.sin(x + 2 * y)
    for out_axes in (1, 2):
        found = replicas.assert_as_jax(fn, x, y, in_axes=(1, 2), out_axes=out_axes)
        assert found.shape == (*(2, 4)[:out_axes], n, *(2, 4)[out_axes:])


def test_axes_may_be_prefixes_of_trees(replicas):
    x = {"a": replicas.rows(3), "b": [replicas.rows(2, 5).swapaxes(0, 1), np.float32(2)]}
    fn = lambda x, y: {"s": x["a"] * x["b"][1] + y, "t": (x["b"][0], lax.psum(x["a"], "i"))}
    replicas.assert_as_jax(
        fn,
        x,
        np.float32(3),
        in_axes=({"a": 0, "b": [1, None]}, None),
        out_axes={"s": 1, "t": (0, None)},
    )


def test_what_is_shared_goes_in_and_out_whole(replicas):
    shared, rows = np.arange(6, dtype=np.float32).reshape(2, 3), replicas.rows(3)
    found = replicas.assert_as_jax(
        lambda w, x: (w * 2, w - lax.pmean(x, "i"), w + x),
        shared,
        rows,
        in_axes=(None, 0),
        out_axes=(None, None, 0),
    )
    assert [leaf.shape for leaf in found] == [(2, 3), (2, 3), (replicas.count, 2, 3)]


def _accumulate(total, held, count, x):
    """Adds to `total` at every second step, as files that accumulate gradients do."""
    count, held = (count + 1) % 2, held + x
    total = lax.cond(count == 0, lambda: total + lax.pmean(held, "i"), lambda: total)
    return total, jnp.where(count == 0, 0, held), count


def test_a_counter_that_decides_on_a_collective_is_shared(replicas):
    """Where it has an axis it could differ: `jax.pmap` would wait for ever then."""
    axes = {"in_axes": (0, 0, None, 0), "out_axes": (0, 0, None)}
    zeros = np.zeros((replicas.count, 3), np.float32)
    state = (zeros, zeros, np.int32(0))
    for seed in range(2):
        rows = replicas.rows(3, seed=seed)
        state = jax.device_get(replicas.assert_as_jax(_accumulate, *state, rows, **axes))
    assert int(state[2]) == 0 and np.any(state[0])
    if replicas.count > 1:
        counts = np.zeros(replicas.count, np.int32)
        with pytest.raises(dj.errors.DivergenceError, match="a counter that dj.pmap takes, in_axe"):
            replicas.pmap(_accumulate, "i")(zeros, zeros, counts, replicas.rows(3))


def test_keyword_arguments_are_mapped(replicas):
    rows = replicas.rows(3)
    found = replicas.pmap(lambda x, k: x + k["a"], in_axes=None)(np.float32(1), k={"a": rows})
    np.testing.assert_array_equal(found, rows + 1)
    only = replicas.pmap(lambda *, k: k * 2)(k=rows)
    np.testing.assert_array_equal(only, rows * 2)


def test_static_arguments(replicas):
    rows, calls = replicas.rows(3), []

    @functools.partial(replicas.pmap, static_broadcasted_argnums=(1, 2))
    def fn(x, power, function):
        calls.append(power)
        return function(x) ** power

    np.testing.assert_allclose(fn(rows, 2, jnp.sin), np.sin(rows) ** 2, rtol=1e-5)
    np.testing.assert_allclose(fn(rows, 3, jnp.cos), np.cos(rows) ** 3, rtol=1e-4, atol=1e-6)
    fn(rows + 1, 2, jnp.sin)
    assert calls == [2, 3]
    axes = replicas.pmap(lambda x, k: x * k, in_axes=(1, None), static_broadcasted_argnums=1)
    np.testing.assert_array_equal(axes(rows.T, 2), rows * 2)
    short = replicas.pmap(lambda x, k: x * k, in_axes=(1,), static_broadcasted_argnums=1)
    np.testing.assert_array_equal(short(rows.T, 2), rows * 2)


def test_a_method(replicas):
    class Model:
        @functools.partial(dj.pmap, static_broadcasted_argnums=0, strategy=replicas.strategy)
        def double(self, x):
            return 2 * x

    rows = replicas.rows(3)
    np.testing.assert_array_equal(Model().double(rows), 2 * rows)


def test_a_deep_copy_of_an_object_maps_the_method_of_the_copy(replicas):
    class Model:
        def __init__(self):
            self.factor = 2
            self.step = replicas.pmap(self.scaled)

        def scaled(self, x):
            return self.factor * x

    model, rows = Model(), replicas.rows(3)
    np.testing.assert_array_equal(model.step(rows), 2 * rows)
    copied = copy.deepcopy(model)
    copied.factor = 3
    np.testing.assert_array_equal(copied.step(rows), 3 * rows)
    np.testing.assert_array_equal(model.step(rows), 2 * rows)


def test_many_arguments(replicas):
    columns = [np.full(replicas.count, i, np.int32) for i in range(60)]
    found = replicas.pmap(lambda xs: sum(xs))(columns)
    assert np.asarray(found).tolist() == [sum(range(60))] * replicas.count


def test_results_come_back_in_again(replicas):
    rows = replicas.rows(3)
    double = replicas.pmap(lambda x: 2 * x, "i")
    found = double(double(jnp.asarray(rows)))
    assert isinstance(found, jax.Array) and found.shape == rows.shape
    np.testing.assert_array_equal(found, 4 * rows)
    np.testing.assert_array_equal(found[0], 4 * rows[0])
    np.testing.assert_array_equal(jax.jit(lambda z: z + found)(7), 4 * rows + 7)


def test_a_new_shape_or_dtype_is_a_new_program(replicas):
    fn = replicas.pmap(lambda x: x + 1)
    for rows in (replicas.rows(3), replicas.rows(2, 2), replicas.rows(3).astype(np.int32)):
        assert_equal(fn(rows), jnp.asarray(rows + 1))


def test_another_number_of_rows_has_other_replicas():
    fn = dj.pmap(lambda x: x / lax.psum(x, "i"), "i")
    for count in (2, 8, 1):
        assert_equal(fn(np.ones(count, np.float32)), jnp.full(count, 1 / count))


def test_stacked_results_lie_on_the_replicas():
    x = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    for out in (dj.pmap(lambda x: 2 * x, "i")(x), dj.pmap(lambda x: jnp.ones(2), "i")(x)):
        assert out.sharding.spec[0] is not None and not out.is_fully_replicated
        shards = sorted(out.addressable_shards, key=lambda s: s.index[0].start)
        assert [s.device for s in shards] == jax.local_devices()[:8]
    last = dj.pmap(lambda x: x, "i", out_axes=1)(x)
    assert {s.data.shape for s in last.addressable_shards} == {(2, 1)}
    one = dj.pmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)(x)
    assert one.is_fully_replicated and one.shape == (2,)


def test_devices_are_taken_in_their_order():
    devices = jax.devices()[:1:-1]
    rows = jax.device_put(np.arange(6, dtype=np.float32), jax.devices()[0])
    out = dj.pmap(lambda x: x + lax.axis_index("i"), "i", devices=devices)(rows)
    shards = sorted(out.addressable_shards, key=lambda s: s.index[0].start or 0)
    assert [s.device for s in shards] == devices
    assert out.tolist() == [0, 2, 4, 6, 8, 10]
    few = dj.pmap(lambda x: 2 * x, devices=devices)(np.arange(2))
    assert few.tolist() == [0, 2] and few.sharding.device_set == set(devices[:2])
    assert dj.pmap(lambda x: 2 * x, backend="cpu")(np.arange(3)).tolist() == [0, 2, 4]


def test_arrays_from_elsewhere_are_moved():
    rows = np.arange(8, dtype=np.float32)
    fn = dj.pmap(lambda w, x: w + x, in_axes=(None, 0))
    on_one = jax.device_put(rows, jax.devices()[3])
    everywhere = jax.device_put(rows, dj.MirroredStrategy().extended.topology.mirrored)
    for x in (rows, jnp.asarray(rows), on_one, everywhere):
        np.testing.assert_array_equal(fn(jax.device_put(1.0, jax.devices()[5]), x), rows + 1)


def test_donated_arguments_are_gone(replicas):
    state = jnp.asarray(replicas.rows(4))
    fn = replicas.pmap(lambda s, x: (s + x, x), donate_argnums=0)
    state, kept = fn(state, replicas.rows(4))
    after, _ = fn(state, kept)
    assert state.is_deleted() and not kept.is_deleted()
    np.testing.assert_array_equal(after, 3 * replicas.rows(4))


def test_a_donated_argument_counted_from_the_last(replicas):
    state = jnp.asarray(replicas.rows(4))
    fn = replicas.pmap(lambda x, s: s + x, donate_argnums=-1)
    state = fn(replicas.rows(4), before := fn(replicas.rows(4), state))
    assert before.is_deleted()


def test_lower():
    lowered = dj.pmap(lambda x: x - lax.pmean(x, "i"), "i").lower(np.ones((8, 4), np.float32))
    assert "all-reduce" in lowered.compile().as_text()


@pytest.mark.parametrize("kind", ["local", "virtual"])
def test_the_names_of_the_function_stay(kind):
    def body(x):
        return x

    mapped = Replicas(2, kind).pmap(body)
    assert mapped.__wrapped__ is body and mapped.__name__ == "body"
    assert repr(mapped) == "dj.pmap(test_the_names_of_the_function_stay.<locals>.body)"
