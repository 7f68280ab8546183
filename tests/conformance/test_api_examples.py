"""The examples of the API documents (TF 1.12 to 1.15), written anew, give their results."""

import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from tests.replicas import local, num_copies


@pytest.mark.api_row(
    "call_for_each_replica", "merge_call", "eager and graph execution", "replica_id_in_sync_group"
)
def test_call_for_each_replica_example(strategy, how):
    """TF 1.12 and 1.13: merge_fn sums `three + replica id`; each adds its own."""
    count = strategy.num_replicas_in_sync

    def merge_fn(strategy, three_plus_replica_id):
        return sum(strategy.local_results(three_plus_replica_id))

    def fn(three):
        ctx = dj.get_replica_context()
        v = three + ctx.replica_id_in_sync_group
        s = ctx.merge_call(merge_fn, args=(v,))
        return s + v

    run = how(lambda: strategy.extended.call_for_each_replica(fn, args=[3]))
    with strategy.scope():
        merged_results = run()
    total = sum(3 + r for r in range(count))
    expected = [total + 3 + r for r in range(count)]
    assert local(strategy, merged_results) == expected


@pytest.mark.api_row("colocate_vars_with", "update", "eager and graph execution")
def test_colocated_update_example(strategy, how):
    """TF 1.15: fn(v1, v2, v3) runs on every device of var1; the others are there too."""
    with strategy.scope():
        var1 = dj.Variable(1.0, name="var1")
        with strategy.extended.colocate_vars_with(var1):
            var2 = dj.Variable(2.0, name="var2")
            var3 = dj.Variable(3.0, name="var3")

    def fn(v1, v2, v3):
        return v1.assign_add(v2.value * v3.value)

    result = how(lambda: strategy.extended.update(var1, fn, args=(var2, var3)))()
    assert float(result) == 7.0
    assert local(strategy, var1) == [7.0] * num_copies(strategy, var1)
    assert dj.locality(var2) == dj.locality(var1) == dj.locality(var3)


@pytest.mark.api_row(
    "the four steps of an update",
    "synchronous training",
    "an algorithm written with the strategy's methods",
    "eager and graph execution",
    "VariableAggregation as a reduction",
)
@pytest.mark.pairwise
@pytest.mark.parametrize("batched", [False, True])
def test_r247_update_pattern_in_four_steps(strategy, how, batched):
    """TF 1.12 to 1.15: gradients, merge_call, reduce_to the variable, update."""
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        w = dj.Variable(10.0, name="w")

    def merge_fn(strategy, gradient, variable):
        extended = strategy.extended
        if batched:
            reduced = extended.batch_reduce_to("sum", [(gradient, variable)])[0]
        else:
            reduced = extended.reduce_to(dj.VariableAggregation.SUM, gradient, variable)
        extended.update(variable, lambda v, g: v.assign_sub(0.5 * g), args=(reduced,))

    def step():
        ctx = dj.get_replica_context()
        gradient = jnp.float32(ctx.replica_id_in_sync_group + 1)
        ctx.merge_call(merge_fn, args=(gradient, w))
        return w.value

    seen = how(lambda: strategy.run(step))()
    expected = 10.0 - 0.5 * sum(range(1, count + 1))
    assert float(seen) == expected
    assert local(strategy, w) == [expected] * num_copies(strategy, w)


@pytest.mark.api_row(
    "unwrapping of arguments",
    "merging: the same object from every replica",
    "merging: values that differ",
    "merging: the members of a mirrored variable",
)
def test_unwrapping_and_merging(strategy):
    """TF 1.12 to 1.15: (x, a, v0) on each replica gives (x, wrapped a, v)."""
    count = strategy.num_replicas_in_sync
    x = object()
    with strategy.scope():
        v = dj.Variable(1.0)

    def fn(w):
        return x, w + dj.get_replica_context().replica_id_in_sync_group, v

    out_x, out_a, out_v = strategy.run(fn, args=[np.float32(1)])
    assert out_x is x
    assert out_v is v
    assert local(strategy, out_a) == [1.0 + r for r in range(count)]


@pytest.mark.api_row("reduce_to", "an algorithm written with the strategy's methods")
def test_all_reduce_of_an_intermediate_value(strategy):
    """TF 1.12 and 1.13: reduce_to with the same value as input and destination."""
    count = strategy.num_replicas_in_sync

    def fn():
        ctx = dj.get_replica_context()
        t = jnp.float32(ctx.replica_id_in_sync_group)
        return ctx.merge_call(lambda s, t: s.extended.reduce_to("mean", t, t), args=(t,))

    assert float(strategy.run(fn)) == (count - 1) / 2


@pytest.mark.api_row(
    "sync-on-read variable: reads and writes in a replica",
    "sync-on-read variable: read across replicas",
)
def test_sync_on_read_average(strategy):
    """TF 1.15: v = 0.9 * v + 0.1 * update is written per replica, summed on read."""
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        v = dj.Variable(
            1.0,
            synchronization=dj.VariableSynchronization.ON_READ,
            aggregation=dj.VariableAggregation.SUM,
        )

    def fn():
        update = dj.get_replica_context().replica_id_in_sync_group + 1
        v.assign(0.9 * v.value + 0.1 * update)

    strategy.run(fn)
    expected = [0.9 + 0.1 * (r + 1) for r in range(count)]
    np.testing.assert_allclose(local(strategy, v), expected, rtol=1e-6)
    np.testing.assert_allclose(float(v.value), sum(expected), rtol=1e-6)
