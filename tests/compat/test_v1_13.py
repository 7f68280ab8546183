"""What the documents of TF 1.13 show runs under its names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.compat import v1_12, v1_13
from tests.compat import api_versions
from tests.compat.api_versions import numbers

count, plain = api_versions.count, api_versions.plain  # fixtures


@pytest.fixture
def strategy(plain):
    return v1_13.Strategy(plain)


@pytest.mark.api_row("call_for_each_replica", "merge_call", "unwrap", "replica_id_in_sync_group")
def test_call_for_each_replica_example(strategy, count):
    def merge_fn(distribution, three_plus_replica_id):
        return sum(distribution.unwrap(three_plus_replica_id))

    def fn(three):
        replica_ctx = v1_13.get_replica_context()
        v = three + replica_ctx.replica_id_in_sync_group
        s = replica_ctx.merge_call(merge_fn, args=(v,))
        return s + v

    total = sum(3 + r for r in range(count))
    with strategy.scope() as entered:
        assert entered is strategy
        for call in (strategy.call_for_each_replica, strategy.extended.call_for_each_replica):
            unwrapped = strategy.unwrap(call(fn, args=[3]))
            assert isinstance(unwrapped, list)
            assert numbers(unwrapped) == [total + 3 + r for r in range(count)]


@pytest.mark.api_row(
    "ordinary model code under a strategy",
    "make_dataset_iterator",
    "iterator.get_next",
    "extended",
    "data parallelism",
)
def test_training_example(strategy, count):
    """make_dataset_iterator, call_for_each_replica on get_next, group."""
    dataset = [np.arange(24, dtype=np.float32), np.ones(24, np.float32)]
    with strategy.scope():
        iterator = strategy.make_dataset_iterator(dataset)
        w = v1_13.Variable(0.0, aggregation=v1_13.VariableAggregation.SUM)

        def replica_fn(x):
            return w.assign_add(jnp.sum(x))

        for total in (276.0, 300.0):
            train_ops = strategy.extended.call_for_each_replica(
                replica_fn, args=(iterator.get_next(),)
            )
            strategy.group(train_ops)
            assert float(w.value) == total
        assert float(strategy.reduce(v1_13.ReduceOp.MEAN, train_ops)) == 300.0
    again = strategy.make_dataset_iterator(dataset)
    strategy.experimental_run(replica_fn, again)
    assert float(w.value) == 576.0
    assert strategy.experimental_run(lambda: 7) == 7


@pytest.mark.api_row("make_one_shot_iterator", "distribute_dataset (deprecated in 1.13)")
def test_the_deprecated_one_shot_iterator(strategy):
    dataset = strategy.distribute_dataset([np.full(24, i, np.float32) for i in range(2)])
    for _ in range(2):  # each iterator starts anew
        iterator = dataset.make_one_shot_iterator()
        for i in range(2):
            parts = strategy.unwrap(iterator.get_next())
            assert sum(float(jnp.sum(x)) for x in parts) == 24.0 * i
        with pytest.raises(StopIteration):
            iterator.get_next()


def test_iterators_of_the_default_strategy():
    """ "You may use this API whether or not a Strategy is being used"."""
    strategy = v1_13.get_strategy()
    iterator = strategy.make_dataset_iterator([np.ones(2), np.full(2, 2.0)])
    assert iter(iterator) is iterator and iterator.get_next().tolist() == [1.0, 1.0]
    assert strategy.experimental_run(lambda x: x * 2, iterator).tolist() == [4.0, 4.0]
    with pytest.raises(StopIteration):
        iterator.get_next()
    assert strategy.make_input_fn_iterator(lambda context: [3.0]).get_next() == 3.0
    distribution = v1_12.get_distribution_strategy()
    dataset = distribution.distribute_dataset([5.0, 6.0])
    assert (dataset.get_next(), dataset.get_next()) == (5.0, 6.0)
    assert dataset.make_one_shot_iterator().get_next() == 5.0


def test_input_function(strategy, count):
    def input_fn(context):
        return [np.full(2, i, np.float32) for i in range(context.num_replicas_in_sync)]

    element = strategy.make_input_fn_iterator(input_fn).get_next()
    assert [float(x[0]) for x in strategy.unwrap(element)] == list(range(count))


@pytest.mark.api_row(
    "reduce_to",
    "batch_reduce_to",
    "the four steps of an update",
    "VariableAggregation as a reduction",
    "synchronous training",
)
@pytest.mark.parametrize("batched", [False, True])
def test_update_pattern(strategy, count, batched):
    """reduce_to (or batch_reduce_to) the variable, then extended.update."""
    with strategy.scope():
        w = v1_13.Variable(10.0)

    def merge_fn(d, gradient):
        if batched:
            (g,) = d.extended.batch_reduce_to(v1_13.VariableAggregation.SUM, [(gradient, w)])
        else:
            g = d.extended.reduce_to(v1_13.VariableAggregation.SUM, gradient, w)
        d.extended.update(w, lambda v, g: v.assign_sub(0.5 * g), args=(g,))

    def fn():
        ctx = v1_13.get_replica_context()
        ctx.merge_call(merge_fn, args=(jnp.float32(ctx.replica_id_in_sync_group + 1),))

    strategy.call_for_each_replica(fn)
    assert float(strategy.extended.read_var(w)) == 10.0 - 0.5 * sum(range(1, count + 1))


def test_all_reduce_of_an_intermediate_value(strategy, count):
    def fn():
        ctx = v1_13.get_replica_context()
        t = jnp.float32(ctx.replica_id_in_sync_group)
        return ctx.merge_call(lambda d, t: d.extended.reduce_to("mean", t, t), args=(t,))

    assert float(strategy.call_for_each_replica(fn)) == (count - 1) / 2


@pytest.mark.api_row("get_replica_context", "replica context", "default single-replica context")
def test_contexts(strategy, count):
    assert v1_13.get_replica_context().num_replicas_in_sync == 1
    assert not v1_13.has_strategy()

    def fn():
        assert v1_13.get_replica_context().strategy == strategy
        assert v1_13.get_strategy() == strategy
        return v1_13.get_replica_context().num_replicas_in_sync

    with strategy.scope():
        assert v1_13.get_replica_context() is None
        assert v1_13.in_cross_replica_context()
    assert strategy.call_for_each_replica(fn) == count


@pytest.mark.api_row(
    "experimental_between_graph",
    "experimental_should_init",
    "should_checkpoint",
    "should_save_summary",
    "worker_devices",
    "parameter_devices",
    "broadcast_to",
)
def test_the_rest_of_the_face(strategy, count):
    extended = strategy.extended
    assert strategy.num_replicas_in_sync == count
    assert strategy.experimental_initialize() == strategy.experimental_finalize() == []
    assert not extended.experimental_between_graph
    assert not extended.experimental_require_static_shapes
    assert extended.experimental_should_init
    assert extended.should_checkpoint
    assert extended.should_save_summary
    assert len(extended.worker_devices) == len(extended.parameter_devices)
    with strategy.scope():
        v = v1_13.Variable(1.0)
        with extended.colocate_vars_with(v):
            slot = v1_13.Variable(2.0)
    assert dj.locality(slot) == dj.locality(v)
    assert extended.variable_created_in_scope(v)
    devices = extended.non_slot_devices([v])
    assert extended.update_non_slot(devices, lambda x: x + 1, args=(1,)) == 2
    assert float(strategy.broadcast(jnp.float32(4))) == 4.0
    assert float(extended.broadcast_to(jnp.float32(4), v)) == 4.0


@pytest.mark.api_row(
    "experimental_run_steps_on_iterator", "initial_loop_values", "last_step_outputs"
)
def test_experimental_run_steps_on_iterator(strategy):
    iterator = strategy.make_dataset_iterator([np.full(24, i, np.float32) for i in range(4)])

    def step_fn(context, x):
        assert isinstance(context, v1_13.MultiStepContext)
        total = strategy.extended.call_for_each_replica(lambda x: jnp.sum(x), args=(x,))
        context.set_last_step_output("total", total, v1_13.ReduceOp.SUM)

    run_steps = strategy.extended.experimental_run_steps_on_iterator
    context = run_steps(step_fn, iterator, 3, initial_loop_values={"total": 0.0})
    assert float(context.last_step_outputs["total"]) == 48.0
    assert float(run_steps(step_fn, iterator).last_step_outputs["total"]) == 72.0


def test_constructors():
    assert v1_13.MirroredStrategy(jax.devices()[:2]).num_replicas_in_sync == 2
    assert v1_13.OneDeviceStrategy().num_replicas_in_sync == 1


@pytest.mark.api_row("parameter server, asynchronous")
def test_parameter_servers():
    strategy = v1_13.ParameterServerStrategy(2)
    with strategy.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def step(x):
        total.assign_add(x)

    strategy.extended.call_for_each_replica(step, args=(2.0,))
    with pytest.raises(TypeError, match=r"dj.Coordinator\(strategy.wrapped\)"):
        dj.Coordinator(strategy)
    with dj.Coordinator(strategy.wrapped) as coordinator:
        coordinator.schedule(step, args=(1.0,))
    assert float(total.value) == 3.0
