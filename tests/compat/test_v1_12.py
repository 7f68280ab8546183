"""What the documents of TF 1.12 show runs under the names of the tower API."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import distjax as dj
from distjax.compat import v1_12
from tests.compat import api_versions
from tests.compat.api_versions import numbers

count, plain = api_versions.count, api_versions.plain  # fixtures


@pytest.fixture
def distribution(plain):
    return v1_12.DistributionStrategy(plain)


@pytest.mark.api_row(
    "call_for_each_tower", "merge_call", "tower_id", "unwrap", "get_tower_context", "scope"
)
def test_call_for_each_tower_example(distribution, count):
    def merge_fn(distribution, three_plus_tower_id):
        return sum(distribution.unwrap(three_plus_tower_id))

    def fn(three):
        tower_ctx = v1_12.get_tower_context()
        v = three + tower_ctx.tower_id
        s = tower_ctx.merge_call(merge_fn, v)
        return s + v

    with distribution.scope() as entered:
        assert entered is distribution
        merged_results = distribution.call_for_each_tower(fn, 3, run_concurrently=False)
        unwrapped = distribution.unwrap(merged_results)
    total = sum(3 + r for r in range(count))
    assert isinstance(unwrapped, list)
    assert numbers(unwrapped) == [total + 3 + r for r in range(count)]


@pytest.mark.api_row(
    "ordinary model code under a strategy",
    "distribute_dataset (deprecated in 1.13)",
    "iterator.get_next",
    "tf.group of unwrapped results",
    "call_for_each_tower",
    "data parallelism",
)
@pytest.mark.pairwise
@pytest.mark.parametrize("as_function", [True, False])
def test_training_example(distribution, count, as_function):
    """distribute_dataset, call_for_each_tower on get_next, group the unwrapped."""
    dataset = [np.arange(24, dtype=np.float32), np.ones(24, np.float32)]
    source = (lambda: dataset) if as_function else dataset

    with distribution.scope():
        iterator = distribution.distribute_dataset(source)
        w = v1_12.Variable(0.0, aggregation=v1_12.VariableAggregation.SUM)

        def tower_fn(x):
            return w.assign_add(jnp.sum(x))

        for total in (276.0, 300.0):
            train_op = distribution.call_for_each_tower(tower_fn, iterator.get_next())
            distribution.group(train_op)
            assert float(w.value) == total
        with pytest.raises(StopIteration):
            iterator.get_next()
        one_shot = distribution.distribute_dataset(source).make_one_shot_iterator()
        assert sum(numbers(jnp.sum(x) for x in distribution.unwrap(one_shot.get_next()))) == 276.0
        assert len(list(distribution.distribute_dataset(source))) == 2


@pytest.mark.api_row(
    "reduce (aggregation, value, destinations)",
    "batch_reduce",
    "the four steps of an update",
    '"sum" and "mean" as a reduction',
)
@pytest.mark.parametrize("batched", [False, True])
def test_update_pattern(distribution, count, batched):
    """Steps 3 and 4: reduce to the variable, update it."""
    with distribution.scope():
        w = v1_12.Variable(10.0)

    def merge_fn(d, gradient):
        if batched:
            (g,) = d.batch_reduce(v1_12.VariableAggregation.SUM, [(gradient, w)])
        else:
            g = d.reduce("sum", gradient, w)
        return d.update(w, lambda v, g, rate: v.assign_sub(rate * g), g, rate=0.5)

    def tower_fn():
        ctx = v1_12.get_tower_context()
        return ctx.merge_call(merge_fn, jnp.float32(ctx.tower_id + 1))

    expected = 10.0 - 0.5 * sum(range(1, count + 1))
    assert float(distribution.unwrap(distribution.call_for_each_tower(tower_fn))[0]) == expected
    assert distribution.fetch(w) == expected


@pytest.mark.api_row("reduce (aggregation, value, destinations)")
def test_all_reduce_of_an_intermediate_value(distribution, count):
    """Reduce with no variable as its destination."""

    def tower_fn():
        ctx = v1_12.get_tower_context()
        t = jnp.float32(ctx.tower_id)
        return ctx.merge_call(lambda d, t: d.reduce("mean", t), t)

    result = distribution.call_for_each_tower(tower_fn)
    assert isinstance(result, jax.Array)
    assert float(result) == (count - 1) / 2


@pytest.mark.api_row("get_tower_context", "replica context", "default single-replica context")
def test_contexts(distribution, plain, count):
    assert isinstance(v1_12.get_tower_context(), v1_12.TowerContext)
    assert v1_12.get_tower_context().is_single_tower
    assert v1_12.get_cross_tower_context() is None
    assert not v1_12.has_distribution_strategy()

    def tower_fn():
        ctx = v1_12.get_tower_context()
        assert ctx.num_towers == count
        assert ctx.is_single_tower is (count == 1)
        assert ctx.distribution_strategy == distribution
        assert ctx.device == distribution.worker_devices[0]
        return ctx.merge_call(lambda d, *, x: d.num_towers * x, x=2)

    with distribution.scope():
        assert v1_12.get_tower_context() is None
        assert v1_12.get_cross_tower_context() == distribution
        assert v1_12.get_distribution_strategy() == distribution
        assert v1_12.has_distribution_strategy()
    assert distribution.call_for_each_tower(tower_fn) == 2 * count
    assert hash(distribution) == hash(plain)
    assert distribution != plain
    assert repr(distribution) == f"DistributionStrategy({plain!r})"


@pytest.mark.api_row(
    "broadcast",
    "non_slot_devices",
    "update_non_slot",
    "colocate_vars_with",
    "update (group=False)",
    "value_container",
)
def test_the_rest_of_the_face(distribution, count):
    assert distribution.num_towers == distribution.num_replicas == count
    assert distribution.is_single_tower is (count == 1)
    assert distribution.initialize() == distribution.finalize() == []
    assert not distribution.between_graph
    assert distribution.should_init
    assert distribution.should_checkpoint
    assert distribution.should_save_summary
    assert distribution.parameter_devices == distribution.worker_devices
    with distribution.scope():
        v = v1_12.Variable(1.0, name="v")
        with distribution.colocate_vars_with(v):
            slot = v1_12.Variable(2.0)
        devices = distribution.non_slot_devices([v])
        with distribution.colocate_vars_with(devices):
            step = v1_12.Variable(0)
    assert dj.locality(slot) == dj.locality(v)
    assert distribution.update_non_slot(devices, lambda n: step.assign_add(n), 3) == 3
    ungrouped = distribution.update(v, lambda v, x: v.assign(x.value), slot, grouped=False)
    assert numbers(ungrouped) == [2.0] * count
    assert distribution.value_container(distribution.unwrap(v)[0]) is v
    assert float(distribution.read_var(v)) == 2.0
    assert float(distribution.broadcast(jnp.float32(4))) == 4.0
    assert dj.locality(distribution.broadcast(jnp.float32(4), v)) == dj.locality(v)


@pytest.mark.api_row("fetch")
def test_fetch_of_any_locality(distribution, count):
    per_device = distribution.call_for_each_tower(
        lambda: 2 * jnp.float32(v1_12.get_tower_context().tower_id)
    )
    if count > 1:
        assert isinstance(per_device, v1_12.PerDevice)
        assert distribution.fetch(per_device) == [2.0 * r for r in range(count)]
    mirrored = distribution.broadcast(jnp.ones(2))
    fetched = distribution.fetch(mirrored, fn=lambda x: x + 1)
    assert isinstance(fetched, np.ndarray)
    assert fetched.tolist() == [2.0, 2.0]


@pytest.mark.api_row("initializable iterators (in the future)", "make_one_shot_iterator")
@pytest.mark.pairwise
@pytest.mark.parametrize("make", ["make_one_shot_iterator", "make_initializable_iterator", None])
def test_run_steps_on_dataset(distribution, make):
    """The dataset's own iterator, as TF 1.12 has it, or one made from it."""
    dataset = distribution.distribute_dataset([np.full(24, i, np.float32) for i in range(5)])

    def step_fn(context, x):
        assert isinstance(context, v1_12.MultiStepContext)
        total = distribution.call_for_each_tower(lambda x: jnp.sum(x), x)
        context.set_last_step_output("total", total, v1_12.VariableAggregation.SUM)

    iterator = getattr(dataset, make)() if make else dataset
    context = distribution.run_steps_on_dataset(step_fn, iterator, 3)
    assert float(context.last_step_outputs["total"]) == 48.0
    assert distribution.run_steps_on_dataset(step_fn, iterator, 3).iterations == 2


def test_a_copy_adapts_the_same_strategy(distribution):
    assert copy.copy(distribution) == distribution


def test_constructors():
    assert v1_12.MirroredStrategy(jax.devices()[:2]).num_towers == 2
    assert v1_12.OneDeviceStrategy(jax.devices()[1]).worker_devices == (jax.devices()[1],)
    again = v1_12.DistributionStrategy(v1_12.OneDeviceStrategy())
    assert isinstance(again.wrapped, dj.OneDeviceStrategy)
    with pytest.raises(AttributeError, match="nonsense"):
        again.nonsense  # noqa: B018


@pytest.mark.api_row("parameter server, asynchronous")
def test_parameter_servers():
    strategy = v1_12.ParameterServerStrategy(2)
    with strategy.scope():
        total = dj.Variable(0.0, aggregation=dj.VariableAggregation.SUM)

    def step(x):
        total.assign_add(x)

    strategy.call_for_each_tower(step, 2.0)
    with pytest.raises(TypeError, match=r"dj.Coordinator\(strategy.wrapped\)"):
        dj.Coordinator(strategy)
    with dj.Coordinator(strategy.wrapped) as coordinator:
        coordinator.schedule(step, args=(1.0,))
    assert float(total.value) == 3.0
