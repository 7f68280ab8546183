"""What the documents of TF 1.15 show runs under its names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.compat import v1_15
from tests.compat import api_versions
from tests.compat.api_versions import ADAPTERS, numbers, replicas

count, plain = api_versions.count, api_versions.plain  # fixtures


@pytest.fixture
def strategy(plain):
    return v1_15.Strategy(plain)


@pytest.mark.api_row(
    "experimental_run_v2",
    "experimental_local_results",
    "merging: the same object from every replica",
    "unwrapping of arguments",
)
def test_experimental_run_v2_unwraps_and_merges(strategy, count):
    """fn returns (x, a, v0) on each replica: (x, wrapped a, v)."""
    x = object()
    with strategy.scope() as entered:
        assert entered is strategy
        v = v1_15.Variable(1.0)

    def fn(w):
        return x, w + v1_15.get_replica_context().replica_id_in_sync_group, v

    out_x, out_a, out_v = strategy.experimental_run_v2(fn, args=[np.float32(1)])
    assert out_x is x
    assert out_v is v
    assert numbers(strategy.experimental_local_results(out_a)) == [1.0 + r for r in range(count)]
    assert isinstance(strategy.unwrap(out_a), tuple)


@pytest.mark.api_row("colocate_vars_with", "update", "extended")
def test_colocated_update_example(strategy, count):
    with strategy.scope():
        var1 = v1_15.Variable(1.0)
        with strategy.extended.colocate_vars_with(var1):
            var2, var3 = v1_15.Variable(2.0), v1_15.Variable(3.0)

    def fn(v1, v2, v3):
        return v1.assign_add(v2.value * v3.value)

    strategy.extended.update(var1, fn, args=(var2, var3))
    assert numbers(strategy.experimental_local_results(var1)) == [7.0] * count


@pytest.mark.api_row("batch_reduce_to", "the four steps of an update")
def test_update_pattern(strategy, count):
    with strategy.scope():
        w = v1_15.Variable(10.0)

    def merge_fn(strategy, gradient, variable):
        (g,) = strategy.extended.batch_reduce_to(v1_15.ReduceOp.SUM, [(gradient, variable)])
        strategy.extended.update(variable, lambda v, g: v.assign_sub(0.5 * g), args=(g,))
        return strategy.num_replicas_in_sync

    def fn():
        ctx = v1_15.get_replica_context()
        gradient = jnp.float32(ctx.replica_id_in_sync_group + 1)
        return ctx.merge_call(merge_fn, args=(gradient, w))

    assert strategy.experimental_run_v2(fn) == count
    assert float(w.value) == 10.0 - 0.5 * sum(range(1, count + 1))


@pytest.mark.api_row("sync-on-read variable (replica-local)", "read_var", "VariableSynchronization")
def test_sync_on_read(strategy, count):
    with strategy.scope():
        v = v1_15.Variable(
            1.0,
            synchronization=v1_15.VariableSynchronization.ON_READ,
            aggregation=v1_15.VariableAggregation.SUM,
        )

    def fn():
        update = v1_15.get_replica_context().replica_id_in_sync_group + 1
        v.assign(0.9 * v.value + 0.1 * update)
        return v1_15.get_replica_context().all_reduce("sum", v.value)

    seen = strategy.experimental_run_v2(fn)
    np.testing.assert_allclose(seen, strategy.extended.read_var(v), rtol=1e-6)


@pytest.mark.api_row("experimental_distribute_dataset")
def test_experimental_distribute_dataset(strategy, count):
    batches = [np.arange(24, dtype=np.float32), np.ones(24, np.float32)]
    totals = []
    for x in strategy.experimental_distribute_dataset(batches):
        partial = strategy.experimental_run_v2(lambda x: jnp.sum(x), args=(x,))
        totals.append(float(strategy.reduce("sum", partial)))
    assert totals == [276.0, 24.0]
    iterator = strategy.make_dataset_iterator(batches)
    partial = strategy.experimental_run(lambda x: jnp.sum(x), iterator)
    assert float(strategy.reduce("sum", partial)) == 276.0


@pytest.mark.api_row("experimental_distribute_datasets_from_function")
def test_experimental_distribute_datasets_from_function(strategy, count):
    def dataset_fn(context):
        assert isinstance(context, v1_15.InputContext)
        return [np.full(2, i, np.float32) for i in range(context.num_replicas_in_sync)]

    (element,) = strategy.experimental_distribute_datasets_from_function(dataset_fn)
    assert [float(x[0]) for x in strategy.unwrap(element)] == list(range(count))
    element = strategy.make_input_fn_iterator(dataset_fn).get_next()
    assert [float(x[0]) for x in strategy.unwrap(element)] == list(range(count))


@pytest.mark.api_row("get_replica_context", "in_cross_replica_context")
def test_contexts(strategy, count):
    assert v1_15.get_replica_context().replica_id_in_sync_group == 0

    def fn():
        assert v1_15.get_replica_context().strategy == v1_15.get_strategy() == strategy
        return v1_15.get_replica_context().num_replicas_in_sync

    assert strategy.experimental_run_v2(fn) == count
    v1_15.experimental_set_strategy(strategy)
    assert v1_15.get_strategy() == strategy
    assert v1_15.has_strategy()
    assert v1_15.in_cross_replica_context()
    assert v1_15.get_replica_context() is None
    v1_15.experimental_set_strategy(None)
    assert not v1_15.has_strategy()


@pytest.mark.api_row(
    "experimental_require_static_shapes",
    "variable_created_in_scope",
    "value_container",
    "worker_devices",
    "parameter_devices",
)
def test_the_rest_of_the_face(strategy, plain):
    extended = strategy.extended
    assert not extended.experimental_require_static_shapes
    assert not extended.experimental_between_graph
    assert extended.experimental_should_init
    assert extended.worker_devices == extended.parameter_devices == plain.extended.worker_devices
    with strategy.scope():
        v = v1_15.Variable(1.0)
    part = strategy.experimental_local_results(v)[0]
    assert extended.value_container(part) is v
    assert extended.variable_created_in_scope(v)


def test_constructors():
    assert v1_15.MirroredStrategy(jax.devices()[:2]).num_replicas_in_sync == 2
    assert v1_15.OneDeviceStrategy().num_replicas_in_sync == 1


@pytest.mark.parametrize("version", ADAPTERS)
def test_an_adapter_compiles_once(version):
    """A function called through an adapter is traced once, though adapters are made anew."""
    traced = []

    def fn(x):
        traced.append(x)
        return x + 1

    plain = replicas("virtual", 2)
    for _ in range(3):
        adapter = ADAPTERS[version](plain)
        assert adapter.extended.call_for_each_replica(fn, args=(jnp.float32(1),)) == 2.0
    assert len(traced) == 1


def test_ages_are_attributes_of_distjax():
    assert dj.compat.v1_15 is v1_15
    assert {"compat", "layers", "metrics", "optim"} <= set(dir(dj))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dj.nonsense  # noqa: B018


def test_parameter_servers():
    strategy = v1_15.ParameterServerStrategy(2)
    with strategy.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def step(x):
        total.assign_add(x)

    strategy.experimental_run_v2(step, args=(2.0,))
    with pytest.raises(TypeError, match=r"dj.Coordinator\(strategy.wrapped\)"):
        dj.Coordinator(strategy)
    with dj.Coordinator(strategy.wrapped) as coordinator:
        coordinator.schedule(step, args=(1.0,))
    assert float(total.value) == 3.0
