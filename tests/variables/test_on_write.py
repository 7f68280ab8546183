"""Mirrored variables: the cases of `tests/cases.md`, "Variables: ON_WRITE"."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.errors import AggregationError
from tests.replicas import ids, local, per_replica

AGG = dj.VariableAggregation
ALL = list(AGG)


def make(strategy, initial_value, aggregation=AGG.NONE, **options):
    with strategy.scope():
        return dj.Variable(initial_value, name="v", aggregation=aggregation, **options)


def parts(variable):
    return [np.asarray(c).tolist() for c in variable.local_results()]


@pytest.mark.api_row("no write in a replica without aggregation")
def test_r183_no_aggregation_in_a_replica(pair):
    v = make(pair, 1.0)
    with pytest.raises(AggregationError, match="You must specify an aggregation"):
        pair.run(lambda: v.assign(5.0))


@pytest.mark.api_row("aggregation of assign in a replica")
@pytest.mark.parametrize("value", [5.0, np.float32(5)])
def test_r185_mean_of_one_value(pair, value):
    v = make(pair, 1.0, AGG.MEAN)
    assert local(pair, pair.run(lambda: v.assign(value))) == [5, 5]
    v.assign(1.0)
    assert local(pair, pair.run(lambda: v.assign_add(value))) == [6, 6]


@pytest.mark.api_row("reads and writes in cross-replica context")
def test_r187_assign_across_replicas(pair, how):
    v = make(pair, 1.0)
    assert float(how(lambda: v.assign(6.0))()) == 6 and parts(v) == [6, 6]


def test_r189_assign_sub_across_replicas(pair, how):
    v = make(pair, 5.0)
    assert float(how(lambda: v.assign_sub(2.0))()) == 3 and parts(v) == [3, 3]


def test_r197_operators_with_sum_of_integers(pair, how):
    v = make(pair, 1, AGG.SUM)
    assert int(how(lambda: v + 1)()) == 2
    assert local(pair, how(lambda: pair.run(lambda: v + 1))()) == [2, 2]


def test_r199_only_the_first_replica_updates(pair):
    v = make(pair, 3.0, AGG.ONLY_FIRST_REPLICA)
    number = lambda: dj.get_replica_context().replica_id_in_sync_group + 1
    assert local(pair, pair.run(lambda: v.assign_add(7 * number()))) == [10, 10]
    assert local(pair, pair.run(lambda: v.assign_add(13 * number()))) == [23, 23]


# JAX has no scatter methods: an update of some rows is `v.value.at[i]`, and what
# is assigned is the whole value, so that aggregation applies to the change.


def test_r201_scatter_add(pair):
    v = make(pair, jnp.zeros(3, jnp.int32), AGG.SUM)

    def fn():
        change = jnp.zeros_like(v.value).at[jnp.array([1, 2])].add(1)
        return v.assign_add(change)

    assert local(pair, pair.run(fn)) == [[0, 2, 2]] * 2


def test_r203_scatter_mul(pair):
    v = make(pair, jnp.array([2.0, 1.0, 1.0]), AGG.MEAN)

    def fn(i):
        return v.assign(v.value.at[i].multiply(jnp.float32(i + 2)))

    # TF averages the factors at [0, 1] as a sparse delta: [2, 1.5, 1]. Here the
    # values are averaged: mean([4, 1, 1], [2, 3, 1]).
    assert local(pair, pair.run(fn, args=(ids(pair, np.int32),))) == [[3, 2, 1]] * 2


def test_r205_scatter_min_max_update(pair):
    def after(start, change):
        v = make(pair, jnp.array(start), AGG.ONLY_FIRST_REPLICA)
        pair.run(lambda: v.assign(change(v.value)))
        return parts(v)

    assert after([0, 2, 0], lambda x: x.at[1].min(1)) == [[0, 1, 0]] * 2
    assert after([0, 0, 0], lambda x: x.at[0].max(1)) == [[1, 0, 0]] * 2
    assert after([0, 0, 0], lambda x: x.at[1].set(3)) == [[0, 3, 0]] * 2


def test_r207_scatter_across_replicas(pair, how):
    v = make(pair, jnp.array([1, 1, 1]), AGG.SUM)
    how(lambda: v.assign(v.value.at[0].add(2)))()
    assert parts(v) == [[3, 1, 1]] * 2
    how(lambda: v.assign(v.value.at[0].min(1)))()
    assert parts(v) == [[1, 1, 1]] * 2


@pytest.mark.parametrize("method", ["assign", "assign_add"])
def test_r209_no_aggregation_never_diverges(pair, method):
    """The rule of TF 1.13 to 1.15; TF 2.2 and later write [1, 2]."""
    v = make(pair, 10.0)
    x = per_replica(pair, [np.float32(1), np.float32(2)])
    with pytest.raises(AggregationError, match="You must specify an aggregation"):
        pair.run(lambda x: getattr(v, method)(x), args=(x,))
    assert parts(v) == [10, 10]


def test_r211_assign_in_a_merge_function(pair, how):
    v = make(pair, 1.0)
    step = how(
        lambda: pair.run(
            lambda: dj.get_replica_context().merge_call(lambda strategy: v.assign(7.0))
        )
    )
    assert local(pair, step()) == [7, 7] and parts(v) == [7, 7]
