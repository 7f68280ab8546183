"""Sync-on-read variables: the cases of `tests/cases.md`, "Variables: ON_READ"."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import AggregationError
from tests.replicas import local, per_replica

AGG = dj.VariableAggregation
ALL = list(AGG)


def make(strategy, initial_value, aggregation=AGG.SUM, **options):
    with strategy.scope():
        return dj.Variable(
            initial_value,
            name="r",
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=aggregation,
            **options,
        )


def parts(variable):
    return [np.asarray(c).tolist() for c in variable.local_results()]


@pytest.mark.parametrize("aggregation", ALL)
def test_r221_read_in_a_replica(pair, aggregation):
    r = make(pair, 0.0, aggregation)
    pair.run(lambda x: r.assign(x), args=(per_replica(pair, [np.float32(1), np.float32(2)]),))
    assert local(pair, pair.run(lambda: r.value)) == [1, 2]


def test_r225_created_in_a_replica(pair):
    made = []

    def fn():
        if not made:
            made.append(
                dj.Variable(
                    1.0,
                    synchronization=dj.VariableSynchronization.ON_READ,
                    aggregation=AGG.SUM,
                )
            )

    pair.run(fn)
    (r,) = made
    assert float(pair.extended.read_var(r)) == 2
    r.assign(6.0)
    assert float(pair.extended.read_var(r)) == 6 and parts(r) == [3, 3]


@pytest.mark.api_row("sync-on-read variable (replica-local)")
def test_r227_components_and_their_value(pair):
    total, mean = make(pair, 1.0), make(pair, 4.0, AGG.MEAN)

    def fn():
        number = dj.get_replica_context().replica_id_in_sync_group
        total.assign_add(jnp.float32(2 + number))
        mean.assign(jnp.float32(6 * number))

    pair.run(fn)
    assert parts(total) == [3, 4] and float(total.value) == 7
    assert parts(mean) == [0, 6] and float(pair.extended.read_var(mean)) == 3


def test_r229_update_of_components(pair, how):
    r = make(pair, 1.0)
    update = lambda: pair.extended.update(r, lambda r, x: r.assign(x), args=(5.0,), group=False)
    assert [float(x) for x in how(update)()] == [5, 5]
    assert parts(r) == [5, 5] and float(r.value) == 10


@pytest.mark.parametrize("name", ["scatter_add", "scatter_sub", "scatter_min", "scatter_update"])
def test_r231_no_scatter_methods(pair, name):
    r = make(pair, jnp.zeros(3))
    with pytest.raises(AttributeError):
        pair.run(lambda: getattr(r, name)(1.0))
    pair.run(lambda: (r.assign(r.value.at[1].add(2.0)), None)[1])  # what JAX has in their place
    assert parts(r) == [[0, 2, 0]] * 2


@pytest.mark.api_row("sync-on-read variable: reads and writes in a replica")
def test_r233_moving_average(pair, how):
    r = make(pair, 1.0)

    def fn():
        number = dj.get_replica_context().replica_id_in_sync_group + 1
        return r.assign(0.9 * r.value + 0.1 * number)

    np.testing.assert_allclose(local(pair, how(lambda: pair.run(fn))()), [1.0, 1.1], rtol=1e-6)
    np.testing.assert_allclose(r.value, 2.1, rtol=1e-6)


def test_r235_metric_by_hand(pair, how):
    total, count = make(pair, 0.0), make(pair, 0.0)

    def fn(batch, mask):
        total.assign_add(jnp.sum(batch * mask))
        count.assign_add(jnp.sum(mask))

    step = how(lambda batch, mask: pair.run(fn, args=(batch, mask)))
    padded = np.concatenate([np.arange(9), np.zeros(3)]).astype(np.float32)
    masks = (np.arange(12) < 9).astype(np.float32)
    for batch, mask in zip(padded.reshape(3, 2, 2), masks.reshape(3, 2, 2), strict=True):
        step(per_replica(pair, batch), per_replica(pair, mask))
    assert float(total.value) == 36 and float(count.value) == 9
    assert float(total.value / count.value) == 4
    assert sum(parts(total)) == 36
    how(lambda: (total.assign(0.0), count.assign(0.0)))()
    assert parts(total) == parts(count) == [0, 0]


def test_a_cross_replica_read_without_aggregation(pair):
    with pytest.raises(AggregationError, match="needs an aggregation"):
        make(pair, 1.0, AGG.NONE).value  # noqa: B018


MODES = {
    "synchronization": dj.VariableSynchronization.ON_READ,
    "aggregation": dj.VariableAggregation.SUM,
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int4", "int32", "uint32"])
@pytest.mark.parametrize("num_replicas", [2, 9, 128, 200, 300])
def test_a_sum_is_divided_exactly_in_any_integer_dtype(dtype, num_replicas):
    """Also where the dtype does not hold the number of replicas."""
    strategy, info = dj.VirtualStrategy(num_replicas), jnp.iinfo(dtype)
    with strategy.scope():
        v = dj.Variable(jnp.zeros(4, dtype), **MODES)
    value = np.asarray([info.min, info.max, info.max // 3, 1])
    v.assign(jnp.asarray(value, dtype))
    parts = [np.asarray(x).astype(np.int64) for x in v.local_results()]
    np.testing.assert_array_equal(np.sum(parts, axis=0), value)
    np.testing.assert_array_equal(np.asarray(v.value).astype(np.int64), value)
